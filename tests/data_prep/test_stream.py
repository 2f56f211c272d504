import random

import numpy as np
import pytest

from data_prep.dataset import open_dataset
from data_prep.plan import Layout
from headrace.errors import DamagedData, NotFound, StorageUnavailable
from headrace.storage import Storage
from tests.data_prep.corpus import open_result, prepare_small, unit_keys, write_files

LAYOUT = Layout(block_tokens=64, shard_bytes=8192)


@pytest.fixture
def dataset(store, tmp_path, work_dir, small_tokenizer):
    write_files(tmp_path / "text", 40)
    return open_result(
        store, prepare_small(store, work_dir, tmp_path / "text", tokenizer=small_tokenizer, layout=LAYOUT)
    )


def flat(dataset, split) -> tuple[list[int], list[int]]:
    """All ids and document ends of a split, read straight from the stored bytes by the index of the units."""
    ids: list[int] = []
    ends: list[int] = []
    for key in unit_keys(dataset):
        unit = dataset.storage.read_json(f"units/{key}/COMMIT.json")["body"]
        for block in unit["blocks"][split]:
            data = dataset.storage.read_bytes(f"units/{key}/{block['shard']}")
            here = np.frombuffer(data, "<u4", block["documents"], block["ends_offset"])
            ends.extend((here + len(ids)).tolist())
            ids.extend(np.frombuffer(data, "<u2", block["tokens"], block["offset"]).tolist())
    return ids, ends


@pytest.mark.parametrize("split", ["train", "validation"])
def test_any_part_of_the_stream_can_be_read(dataset, tmp_path, split):
    ids, ends = flat(dataset, split)
    stream = dataset.stream(split, tmp_path / "cache")
    counts = dataset.counts.splits[split]
    assert (len(stream), stream.num_documents) == (len(ids), len(ends)) == (counts.tokens, counts.documents)
    chance = random.Random(1)
    for _ in range(200):
        start, stop = sorted(chance.choices(range(len(ids) + 1), k=2))
        read = stream.read(start, stop - start)
        assert read.dtype == np.int64
        assert read.tolist() == ids[start:stop]
        assert stream.document_ends(start, stop).tolist() == [end for end in ends if start < end <= stop]
    assert [ids[end - 1] for end in ends] == [dataset.eos_id] * len(ends)
    assert ids.count(dataset.eos_id) == len(ends)


def test_many_sequences_at_once(dataset, tmp_path):
    ids, _ = flat(dataset, "train")
    stream = dataset.stream("train", tmp_path / "cache")
    count = stream.num_sequences(100)
    assert count == (len(ids) - 1) // 100
    order = [count - 1, 0, 3, 1]
    rows = stream.read_many(np.array(order) * 100, 101)
    assert rows.tolist() == [ids[100 * i : 100 * i + 101] for i in order]
    assert stream.num_sequences(len(ids)) == 0
    assert stream.num_sequences(len(ids) - 1) == 1


def test_what_is_not_there_is_an_index_error(dataset, tmp_path):
    stream = dataset.stream("train", tmp_path / "cache")
    size = len(stream)
    assert stream.read(size, 0).tolist() == []
    for start, length in ((-1, 5), (size - 4, 5), (size + 1, 0)):
        with pytest.raises(IndexError, match=rf"is not inside a stream of {size} tokens"):
            stream.read(start, length)
    with pytest.raises(IndexError):
        stream.document_ends(0, size + 1)
    with pytest.raises(ValueError, match="split must be one of train, validation, got 'test'"):
        dataset.stream("test", tmp_path / "cache")


def test_few_tars_are_open_at_a_time(dataset, tmp_path, monkeypatch):
    monkeypatch.setattr("data_prep.stream.MAPPED_SHARDS", 2)
    ids, _ = flat(dataset, "train")
    stream = dataset.stream("train", tmp_path / "cache")
    assert stream.read(0, len(ids)).tolist() == ids
    assert sum(view is not None for view in stream._views) == 2


def some_block(dataset):
    """A block of the training split in which documents end: its tar, its entry, its first position."""
    position = 0
    for key in unit_keys(dataset):
        for block in dataset.storage.read_json(f"units/{key}/COMMIT.json")["body"]["blocks"]["train"]:
            if block["documents"]:
                return f"units/{key}/{block['shard']}", block, position
            position += block["tokens"]
    raise AssertionError("no document ends in any block")


@pytest.mark.parametrize("field", ["offset", "ends_offset"])
def test_a_changed_byte_is_noticed_when_it_is_read(dataset, tmp_path, field):
    key, block, position = some_block(dataset)
    path = dataset.storage.local_path(key)
    data = bytearray(path.read_bytes())
    data[block[field]] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)
    stream = dataset.stream("train", tmp_path / "cache")
    assert stream.read(len(stream) - 5, 5).shape == (5,)  # other blocks are as they were
    with pytest.raises(DamagedData, match=rf"{path.name} is damaged: the block at byte {block['offset']:,} is not"):
        stream.read(position, 5)
    with pytest.raises(DamagedData, match="is damaged"):
        stream.document_ends(position, position + block["tokens"])


def test_a_shorter_or_missing_tar_is_noticed(dataset, tmp_path):
    key, _, position = some_block(dataset)
    path = dataset.storage.local_path(key)
    path.chmod(0o644)
    path.write_bytes(path.read_bytes()[:-512])
    with pytest.raises(DamagedData, match=r"were committed. Delete the folder units/.* and prepare the dataset again"):
        dataset.stream("train", tmp_path / "cache").read(position, 5)
    path.unlink()
    with pytest.raises(DamagedData, match=r"is missing. Delete the folder units/"):
        dataset.stream("train", tmp_path / "cache").read(position, 5)


def test_a_unit_that_is_gone_or_another_is_noticed(dataset, tmp_path):
    key = f"units/{unit_keys(dataset)[0]}/COMMIT.json"
    commit = dataset.storage.read_json(f"units/{unit_keys(dataset)[1]}/COMMIT.json")
    dataset.storage.write_json(key, commit)
    with pytest.raises(DamagedData, match="is not the one that the dataset was made of"):
        dataset.stream("train", tmp_path / "cache")
    dataset.storage.delete(key)
    with pytest.raises(DamagedData, match=r"The unit .* is missing. Prepare the dataset again"):
        dataset.stream("train", tmp_path / "cache")


def test_an_unknown_dataset_is_not_found(store):
    with pytest.raises(NotFound, match="There is no dataset 'nothing-here'"):
        open_dataset(store, "nothing-here")


def test_without_a_folder_tars_are_copied_into_a_bounded_cache(tmp_path, work_dir, small_tokenizer):
    store = Storage.open("memory://stream-cache")
    write_files(tmp_path / "text", 40)
    dataset = open_result(
        store, prepare_small(store, work_dir, tmp_path / "text", tokenizer=small_tokenizer, layout=LAYOUT)
    )
    ids, _ = flat(dataset, "train")
    cache = tmp_path / "cache"
    stream = dataset.stream("train", cache, cache_bytes=100_000)
    assert stream.read(0, len(ids)).tolist() == ids
    copies = list(cache.glob("*.tar"))
    total = sum(len(store.read_bytes(key)) for key in store.list("units") if "/train-" in key)
    assert 0 < sum(path.stat().st_size for path in copies) <= 100_000 < total
    # a second rank on the same machine, and one that starts later, use the copies
    again = dataset.stream("train", cache, cache_bytes=10**9)
    assert again.read(0, len(ids)).tolist() == ids
    assert sum(path.stat().st_size for path in cache.glob("*.tar")) == total
    other = cache / "not-ours.txt"
    other.write_text("kept")
    assert dataset.stream("train", cache, cache_bytes=1).read(0, 5).tolist() == ids[:5]
    assert other.exists()


def test_a_damaged_copy_in_the_cache_is_fetched_again(tmp_path, work_dir, small_tokenizer):
    store = Storage.open("memory://stream-damaged-cache")
    write_files(tmp_path / "text", 20)
    dataset = open_result(
        store, prepare_small(store, work_dir, tmp_path / "text", tokenizer=small_tokenizer, layout=LAYOUT)
    )
    cache = tmp_path / "cache"
    ids = dataset.stream("train", cache).read(0, 100).tolist()
    for path in cache.glob("*.tar"):
        path.write_bytes(path.read_bytes()[:-100])
    assert dataset.stream("train", cache).read(0, 100).tolist() == ids
    for path in cache.glob("*.tar"):
        path.write_bytes(bytes(path.stat().st_size))
    assert dataset.stream("train", cache).read(0, 100).tolist() == ids


def test_a_store_that_is_away_for_a_moment_is_waited_for(tmp_path, work_dir, small_tokenizer, monkeypatch):
    store = Storage.open("memory://stream-away")
    write_files(tmp_path / "text", 20)
    dataset = open_result(
        store, prepare_small(store, work_dir, tmp_path / "text", tokenizer=small_tokenizer, layout=LAYOUT)
    )
    expected = dataset.stream("train", tmp_path / "cache").read(0, 100).tolist()
    failures = [StorageUnavailable("away")] * 3
    get_file = Storage.get_file

    def sometimes(self, key, local):
        if failures:
            raise failures.pop()
        get_file(self, key, local)

    pauses = []
    monkeypatch.setattr(Storage, "get_file", sometimes)
    monkeypatch.setattr("headrace.patience.time.sleep", pauses.append)
    assert dataset.stream("train", tmp_path / "other").read(0, 100).tolist() == expected
    assert len(pauses) == 3
    failures[:] = [StorageUnavailable("away")]
    monkeypatch.setattr("data_prep.stream.PATIENCE_SECONDS", 0.0)
    with pytest.raises(StorageUnavailable):
        dataset.stream("train", tmp_path / "third").read(0, 100)
