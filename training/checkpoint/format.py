"""The format of a checkpoint: raw tensor bytes in one file per rank, and one JSON document that says what lies where.

    rank-0000.bin   chunks of tensors, each little-endian, C order, starting at a multiple of 64 bytes
    rank-0001.bin
    metadata.json   {"format_version": 1,
                     "items": {"model.embed.weight": {"dtype": "float32", "shape": [4096, 256],
                       "chunks": [{"offsets": [0, 0], "sizes": [2048, 256],
                                   "file": "rank-0000.bin", "start": 0, "length": 2097152, "sha256": "..."}]}}}
    COMMIT.json     sizes and digests of the files above, and everything that is not a tensor

A chunk is the part of a tensor that one rank held. Nothing here is a pickle: reading a checkpoint runs no code.
"""

import json
import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from headrace.errors import DamagedData, InputError
from headrace.storage import json_document

FORMAT_VERSION = 1
METADATA_NAME = "metadata.json"
ALIGNMENT = 64
"""Bytes: a chunk can be mapped into memory and used as it lies there, with any vector instruction."""

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    )
}


@dataclass(frozen=True)
class Chunk:
    """Where one part of one tensor lies."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    """Byte offset in the file."""
    length: int
    """Bytes."""
    sha256: str


@dataclass(frozen=True)
class Item:
    """One tensor of the checkpoint."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


def data_file_name(rank: int) -> str:
    """Name of the file that a rank writes."""
    return f"rank-{rank:04d}.bin"


def aligned(position: int) -> int:
    """The next position at which a chunk may start."""
    return -(-position // ALIGNMENT) * ALIGNMENT


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a type in metadata.json; raises InputError for one the format does not know."""
    name = str(dtype).removeprefix("torch.")
    if name not in _DTYPES:
        raise InputError(f"Tensors of type {name} cannot be saved; the types are {', '.join(_DTYPES)}.")
    return name


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, without a copy."""
    assert sys.byteorder == "little", "the format is little-endian; this machine is not"
    if tensor.numel() == 0:
        return memoryview(b"")
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def tensor_from_bytes(data: bytearray, dtype: torch.dtype, sizes: Iterable[int]) -> Tensor:
    """The tensor whose bytes these are; it shares their memory."""
    sizes = tuple(sizes)
    if math.prod(sizes) == 0:
        return torch.empty(sizes, dtype=dtype)
    return torch.frombuffer(data, dtype=dtype).reshape(sizes)


def encode_metadata(items: Mapping[str, Item]) -> bytes:
    """metadata.json of these tensors."""
    document = {
        "format_version": FORMAT_VERSION,
        "items": {
            name: {
                "dtype": dtype_name(item.dtype),
                "shape": list(item.shape),
                "chunks": [
                    {
                        "offsets": list(chunk.offsets),
                        "sizes": list(chunk.sizes),
                        "file": chunk.file,
                        "start": chunk.start,
                        "length": chunk.length,
                        "sha256": chunk.sha256,
                    }
                    for chunk in item.chunks
                ],
            }
            for name, item in items.items()
        },
    }
    return json_document(document)


def decode_metadata(data: bytes, where: str) -> dict[str, Item]:
    """The tensors that metadata.json lists. Raises DamagedData naming `where` when it is not of this format."""
    try:
        document = json.loads(data)
        if document["format_version"] != FORMAT_VERSION:
            raise InputError(
                f"{where} has format version {document['format_version']}, but this version of Headrace reads "
                f"{FORMAT_VERSION}. Use the version that wrote it."
            )
        return {name: _decode_item(item) for name, item in document["items"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedData(f"{where} is not the metadata of a checkpoint: {type(error).__name__}: {error}.") from error


def _decode_item(item: Mapping[str, Any]) -> Item:
    dtype = _DTYPES[item["dtype"]]
    shape = _numbers(item["shape"])
    chunks = []
    for entry in item["chunks"]:
        chunk = Chunk(
            offsets=_numbers(entry["offsets"]),
            sizes=_numbers(entry["sizes"]),
            file=str(entry["file"]),
            start=int(entry["start"]),
            length=int(entry["length"]),
            sha256=str(entry["sha256"]),
        )
        if chunk.length != math.prod(chunk.sizes) * dtype.itemsize or chunk.start < 0:
            raise ValueError(f"a chunk of {chunk.sizes} in {item['dtype']} cannot have {chunk.length} bytes")
        if len(chunk.sizes) != len(shape) or len(chunk.offsets) != len(shape):
            raise ValueError(f"a chunk of {chunk.sizes} at {chunk.offsets} is no part of a tensor of {shape}")
        if any(o < 0 or s < 0 or o + s > n for o, s, n in zip(chunk.offsets, chunk.sizes, shape, strict=True)):
            raise ValueError(f"a chunk of {chunk.sizes} at {chunk.offsets} is no part of a tensor of {shape}")
        chunks.append(chunk)
    if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(shape):
        raise ValueError(f"the chunks do not fill the tensor of {shape}")
    return Item(dtype, shape, tuple(chunks))


def _numbers(values: Iterable[int]) -> tuple[int, ...]:
    return tuple(int(value) for value in values)


def to_dcp_metadata(items: Mapping[str, Item]) -> Metadata:
    """What torch.distributed.checkpoint plans a load from; the storage data are our chunks."""
    described: dict[str, Any] = {}
    stored: dict[MetadataIndex, Chunk] = {}
    for name, item in items.items():
        described[name] = TensorStorageMetadata(
            properties=TensorProperties(dtype=item.dtype),
            size=torch.Size(item.shape),
            chunks=[ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes)) for c in item.chunks],
        )
        for chunk in item.chunks:
            stored[MetadataIndex(name, chunk.offsets)] = chunk
    return Metadata(state_dict_metadata=described, storage_data=stored)
