"""The bytes and the document of a checkpoint, without ranks."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import training.checkpoint
from headrace.digest import sha256_bytes
from headrace.errors import DamagedData, InputError
from training.checkpoint.format import (
    ALIGNMENT,
    Chunk,
    Item,
    aligned,
    decode_metadata,
    dtype_name,
    encode_metadata,
    tensor_bytes,
    tensor_from_bytes,
    to_dcp_metadata,
)

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.int64,
    torch.int8,
    torch.uint8,
    torch.bool,
]


def chunk(offsets=(0, 0), sizes=(2, 3), length=24, start=0):
    return Chunk(offsets, sizes, "rank-0000.bin", start, length, "0" * 64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (3,), (2, 5), (0, 4)])
def test_a_tensor_comes_back_from_its_bytes(dtype, shape):
    tensor = torch.randint(0, 2, shape).to(dtype)
    data = tensor_bytes(tensor)
    assert len(data) == tensor.numel() * dtype.itemsize
    back = tensor_from_bytes(bytearray(data), dtype, shape)
    assert back.dtype == dtype
    assert back.shape == tensor.shape
    assert torch.equal(back.float(), tensor.float())


def test_bytes_are_little_endian_and_in_c_order():
    assert bytes(tensor_bytes(torch.tensor([[1, 2], [3, 256]], dtype=torch.int16))) == bytes([1, 0, 2, 0, 3, 0, 0, 1])


@given(st.integers(min_value=0, max_value=2**40))
def test_aligned_is_the_next_multiple(position):
    assert aligned(position) % ALIGNMENT == 0
    assert position <= aligned(position) < position + ALIGNMENT


@settings(max_examples=50, deadline=None)
@given(
    rows=st.lists(st.integers(min_value=0, max_value=5), min_size=1, max_size=5),
    columns=st.integers(min_value=1, max_value=4),
    dtype=st.sampled_from(DTYPES),
)
def test_the_document_says_again_what_was_put_in(rows, columns, dtype):
    starts = [sum(rows[:i]) for i in range(len(rows))]
    chunks = tuple(
        Chunk((start, 0), (n, columns), f"rank-{i:04d}.bin", 64 * i, n * columns * dtype.itemsize, sha256_bytes(b"x"))
        for i, (start, n) in enumerate(zip(starts, rows, strict=True))
    )
    items = {"model.a": Item(dtype, (sum(rows), columns), chunks)}
    assert decode_metadata(encode_metadata(items), "there") == items


def test_the_document_is_the_one_of_the_docs():
    items = {"model.embed.weight": Item(torch.float32, (2, 3), (chunk(),))}
    assert json.loads(encode_metadata(items)) == {
        "format_version": 1,
        "items": {
            "model.embed.weight": {
                "dtype": "float32",
                "shape": [2, 3],
                "chunks": [
                    {
                        "offsets": [0, 0],
                        "sizes": [2, 3],
                        "file": "rank-0000.bin",
                        "start": 0,
                        "length": 24,
                        "sha256": "0" * 64,
                    }
                ],
            }
        },
    }


@pytest.mark.parametrize(
    ("chunks", "words"),
    [
        ((chunk(length=20),), "cannot have 20 bytes"),
        ((chunk(start=-64),), "cannot have 24 bytes"),
        ((chunk(sizes=(6,), offsets=(0,)),), "no part of a tensor"),
        ((chunk(offsets=(1, 0)),), "no part of a tensor"),
        ((chunk(offsets=(-1, 0)),), "no part of a tensor"),
        ((chunk(sizes=(1, 3), length=12),), "do not fill"),
        ((), "do not fill"),
    ],
)
def test_a_document_that_cannot_be_right_is_refused(chunks, words):
    data = encode_metadata({"model.a": Item(torch.float32, (2, 3), chunks)})
    with pytest.raises(DamagedData, match=words):
        decode_metadata(data, "there")


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"[]", b"{}", b'{"format_version": 1, "items": {"a": {}}}', b'{"format_version": 1, "items": 3}'],
)
def test_what_is_no_such_document_is_refused_with_its_place(data):
    with pytest.raises(DamagedData, match=r"^there is not the metadata of a checkpoint"):
        decode_metadata(data, "there")


def test_an_unknown_type_or_version_is_refused():
    with pytest.raises(InputError, match="complex64 cannot be saved"):
        dtype_name(torch.complex64)
    with pytest.raises(InputError, match="format version 2"):
        decode_metadata(b'{"format_version": 2, "items": {}}', "there")
    strange = json.loads(encode_metadata({"a": Item(torch.float32, (2, 3), (chunk(),))}))
    strange["items"]["a"]["dtype"] = "complex64"
    with pytest.raises(DamagedData, match="complex64"):
        decode_metadata(json.dumps(strange).encode(), "there")


def test_dcp_sees_every_chunk():
    chunks = (chunk(sizes=(1, 3), length=12), chunk(offsets=(1, 0), sizes=(1, 3), length=12, start=64))
    metadata = to_dcp_metadata({"a": Item(torch.float32, (2, 3), chunks)})
    assert metadata.state_dict_metadata["a"].size == torch.Size([2, 3])
    assert sorted(stored.start for stored in metadata.storage_data.values()) == [0, 64]


def test_no_code_of_checkpoints_can_read_a_pickle():
    for path in Path(training.checkpoint.__file__).parent.glob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert not [word for word in ("import pickle", "torch.load", "torch.save", "marshal", "eval(") if word in text]
