import hashlib
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep.config import DataConfig, InputConfig
from data_prep.plan import Layout, _hash_spans, bucket_of, group, plan_units
from data_prep.sources import discover
from data_prep.split import Split
from data_prep.tokenizers import PinnedTokenizer
from headrace.errors import InputError
from tests.data_prep.corpus import write_files, write_jsonl

TOKENIZER = PinnedTokenizer("key", "digest", 300, 0, None)


def config(*paths, **options) -> DataConfig:
    return DataConfig(**{"name": "d", "inputs": tuple(InputConfig(path=str(path)) for path in paths), **options})


def grouped(data: DataConfig):
    return group(discover(data.inputs), data)


def planned(data: DataConfig, tokenizer=TOKENIZER, split=None, layout=None):
    return plan_units(grouped(data), data, tokenizer, split or Split(0.1), layout or Layout())


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=60).map(lambda b: bytes(b"ab\n"[x % 3] for x in b)), st.integers(1, 20), st.integers(1, 9))
def test_spans_cover_the_file_and_a_line_lies_where_its_first_byte_lies(data, step, chunk):
    chunks = (data[i : i + chunk] for i in range(0, len(data), chunk))
    spans = list(_hash_spans(chunks, step))
    assert [start for start, _, _ in spans] == [0, *(stop for _, stop, _ in spans)][: len(spans)]
    assert b"".join(data[start:stop] for start, stop, _ in spans) == data
    assert all(hashlib.sha256(data[start:stop]).hexdigest() == digest for start, stop, digest in spans)
    line_start = 0
    expected = {}
    for line in data.splitlines(keepends=True):
        expected.setdefault(line_start // step, line_start)
        line_start += len(line)
    assert [start for start, _, _ in spans] == list(expected.values())


def test_small_files_go_to_the_bucket_of_their_name(tmp_path):
    texts = write_files(tmp_path, 30)
    groups = grouped(config(tmp_path))
    assert sorted(piece.name for entry in groups for piece in entry.pieces) == sorted(texts)
    for entry in groups:
        numbers = {bucket_of(piece.name, 64) for piece in entry.pieces}
        assert [entry.position] == [f"bucket {number}" for number in numbers]
        assert [piece.name for piece in entry.pieces] == sorted(piece.name for piece in entry.pieces)
    numbers = [int(entry.position.removeprefix("bucket ")) for entry in groups]
    assert numbers == sorted(numbers)


def test_bucket_numbers_are_pinned():
    # A change here moves every file of every corpus to another unit.
    assert [bucket_of(name, 64) for name in ("a.txt", "json/decoder.py", "é")] == BUCKETS


BUCKETS = [53, 37, 19]


def test_a_file_stays_in_its_unit_when_others_come(tmp_path):
    write_files(tmp_path, 20)
    before = {unit.key for unit in planned(config(tmp_path))}
    (tmp_path / "new.txt").write_text("one more")
    after = {unit.key for unit in planned(config(tmp_path))}
    assert len(after - before) == 1
    assert len(before - after) <= 1  # the bucket that the new file joined, if it was not empty


def test_large_jsonl_is_cut_into_ranges_and_appending_keeps_the_first(tmp_path):
    file = write_jsonl(tmp_path / "a.jsonl", [f"document {i} " * 50 for i in range(600)])
    data = config(file, range_bytes=2**16)
    before = planned(data)
    assert len(before) == -(-file.stat().st_size // 2**16)
    assert before[0].pieces[0].start == 0
    assert [u.pieces[0].stop for u in before[:-1]] == [u.pieces[0].start for u in before[1:]]
    assert before[-1].pieces[0].stop == file.stat().st_size
    with file.open("a") as opened:
        opened.write('{"text": "one more"}\n')
    after = planned(data)
    assert [unit.key for unit in after[:-1]] == [unit.key for unit in before[:-1]]
    assert after[-1].key != before[-1].key


def test_a_jsonl_file_of_one_range_or_less_is_a_small_file(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'{"text": "' + b"x" * (2**16 - 12) + b'"}')
    assert file.stat().st_size == 2**16
    assert grouped(config(file, range_bytes=2**16))[0].position.startswith("bucket")
    file.write_bytes(b'{"text": "' + b"x" * (2**16 - 12) + b'"}\n')
    assert grouped(config(file, range_bytes=2**16))[0].position == "a.jsonl[0:65537]"


def test_equal_content_has_equal_keys_wherever_it_lies(tmp_path):
    write_files(tmp_path / "one", 5)
    write_files(tmp_path / "two", 5)
    first, second = planned(config(tmp_path / "one")), planned(config(tmp_path / "two"))
    assert [unit.key for unit in first] == [unit.key for unit in second]
    both = planned(config(tmp_path / "one", tmp_path / "two"))
    assert [unit.key for unit in both] == [unit.key for unit in first] * 2


def test_everything_that_decides_bytes_is_in_the_key(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "a", "body": "b"}\n')
    data = config(file)
    other_field = DataConfig(name="d", inputs=(InputConfig(path=str(file), text_field="body"),))
    as_text = DataConfig(name="d", inputs=(InputConfig(path=str(file), format="txt"),))
    keys = [
        planned(variant, *rest)[0].key
        for variant, *rest in (
            (data,),
            (other_field,),
            (as_text,),
            (config(file, on_error="skip"),),
            (data, replace(TOKENIZER, digest="other")),
            (data, replace(TOKENIZER, vocab_size=70_000)),
            (data, replace(TOKENIZER, eos_id=1)),
            (data, replace(TOKENIZER, bos_id=2)),
            (data, TOKENIZER, Split(0.2)),
            (data, TOKENIZER, Split(0.1), Layout(block_tokens=8)),
            (data, TOKENIZER, Split(0.1), Layout(shard_bytes=8)),
        )
    ]
    assert len(set(keys)) == len(keys)
    # what does not decide bytes is not: where the tokenizer lies, how many processes
    assert planned(data, replace(TOKENIZER, key="elsewhere"))[0].key == keys[0]
    assert planned(config(file, processes=7, num_buckets=128))[0].key == keys[0]


def test_logic_version_is_in_the_key(tmp_path, monkeypatch):
    write_files(tmp_path, 1)
    before = planned(config(tmp_path))[0].key
    monkeypatch.setattr("data_prep.plan.LOGIC_VERSION", 999)
    assert planned(config(tmp_path))[0].key != before


def test_an_empty_file_is_a_piece_of_its_bucket(tmp_path):
    (tmp_path / "empty.txt").write_bytes(b"")
    piece = grouped(config(tmp_path))[0].pieces[0]
    assert (piece.start, piece.stop, piece.size) == (0, 0, 0)
    assert piece.sha256 == hashlib.sha256(b"").hexdigest()


def test_a_file_that_grows_while_it_is_read_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("some text")
    files = discover(config(tmp_path).inputs)
    (tmp_path / "a.txt").write_text("some more text")
    with pytest.raises(InputError, match="was changed while it was being read"):
        group(files, config(tmp_path))
    (tmp_path / "a.txt").unlink()
    with pytest.raises(InputError, match=r"a.txt cannot be read: No such file or directory"):
        group(files, config(tmp_path))
