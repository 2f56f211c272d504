import gc
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from data_prep.config import TokenizerConfig
from data_prep.dataset import PrepareProgress
from data_prep.plan import Layout
from data_prep.units import DOCUMENT_RECORD
from headrace.errors import Retryable
from headrace.storage import Storage
from tests.data_prep.corpus import (
    EOS,
    documents_of,
    open_result,
    plan_fault,
    prepare_small,
    store_digests,
    train_small,
    unit_keys,
    units_on,
    write_files,
    write_jsonl,
)
from tests.headrace.killed import killed_while_writing

# ------------------------------------------------------------------------------------------------- what comes out


def test_every_document_comes_out_once_with_its_text(store, tmp_path, work_dir):
    texts = write_files(tmp_path / "text", 40)
    result = prepare_small(store, work_dir, tmp_path / "text")
    dataset = open_result(store, result)
    tokenizer = Tokenizer.from_buffer(dataset.tokenizer_json())
    found = []
    for split in ("train", "validation"):
        documents = documents_of(dataset, split, tmp_path / "cache")
        assert all(ids[-1] == dataset.eos_id and ids.count(dataset.eos_id) == 1 for ids in documents)
        assert len(documents) == result.counts.splits[split].documents
        decoded = [tokenizer.decode(ids[:-1]) for ids in documents]
        assert sum(len(text.encode()) for text in decoded) == result.counts.splits[split].text_bytes
        assert dataset.token_bytes()[np.concatenate(documents)].sum() == result.counts.splits[split].text_bytes
        found.extend(decoded)
    assert sorted(found) == sorted(texts.values())
    assert result.counts.documents == 40
    assert result.counts.tokens == dataset.counts.tokens
    assert (result.vocab_size, dataset.vocab_size) == (300, 300)
    assert result.tokenizer_trained
    assert result.digest == dataset.digest
    assert dataset.tokenizer_digest == result.tokenizer_digest


def test_the_manifest_and_the_units_say_what_they_hold(store, tmp_path, work_dir, small_tokenizer):
    write_files(tmp_path / "text", 30)
    result = prepare_small(store, work_dir, tmp_path / "text", tokenizer=small_tokenizer)
    body = open_result(store, result).manifest.body
    assert result.dataset_key == f"small-{body['fingerprint'][:16]}"
    assert body["plan"] == {"num_buckets": 64, "range_bytes": 64 * 2**20}
    assert body["dtype"] == "<u2"
    assert body["tokenizer"] == {
        "key": result.tokenizer_key,
        "digest": result.tokenizer_digest,
        "vocab_size": 300,
        "eos_id": 0,
        "bos_id": None,
    }
    for split in ("train", "validation"):
        for field in ("documents", "tokens", "text_bytes"):
            assert sum(unit[split][field] for unit in body["units"]) == body["totals"][split][field]
    names = []
    for line in body["units"]:
        unit = store.read_json(f"units/{line['key']}/COMMIT.json")
        names.extend(piece["path"] for piece in unit["body"]["inputs"])
        assert str(tmp_path) not in json.dumps(unit)
        for split in ("train", "validation"):
            blocks = unit["body"]["blocks"][split]
            assert sum(block["tokens"] for block in blocks) == line[split]["tokens"]
            assert sum(block["documents"] for block in blocks) == line[split]["documents"]
    assert len(names) == len(set(names)) == 30


def test_documents_bin_leads_back_to_the_text(store, tmp_path, work_dir, small_tokenizer):
    texts = [f"document {i} of the old mill" for i in range(30)]
    path = write_jsonl(tmp_path / "a.jsonl", texts)
    dataset = open_result(store, prepare_small(store, work_dir, path, tokenizer=small_tokenizer))
    tokenizer = Tokenizer.from_file(str(small_tokenizer))
    data = path.read_bytes()
    seen = 0
    for split in ("train", "validation"):
        documents = iter(documents_of(dataset, split, tmp_path / "cache"))
        for key in unit_keys(dataset):
            records = store.read_bytes(f"units/{key}/{split}.documents.bin")
            for number, tokens, offset in DOCUMENT_RECORD.iter_unpack(records):
                text = json.loads(data[offset:].split(b"\n")[0])["text"]
                ids = next(documents)
                assert (number, tokens, tokenizer.decode(ids[:-1])) == (0, len(ids), text)
                seen += 1
    assert seen == 30


# the library leaves the files open that it reads
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_stock_webdataset_reads_the_same_tokens(store, tmp_path, work_dir, small_tokenizer):
    write_files(tmp_path / "text", 30)
    layout = Layout(block_tokens=100, shard_bytes=6000)
    dataset = open_result(
        store, prepare_small(store, work_dir, tmp_path / "text", tokenizer=small_tokenizer, layout=layout)
    )
    import webdataset

    for split in ("train", "validation"):
        shards = []
        for key in unit_keys(dataset):
            shards += [str(store.local_path(k)) for k in store.list(f"units/{key}") if f"/{split}-" in k]
        samples = list(webdataset.WebDataset(shards, shardshuffle=False))
        ids = np.concatenate([np.frombuffer(sample["tokens.bin"], "<u2") for sample in samples])
        stream = dataset.stream(split, tmp_path / "cache")
        assert np.array_equal(ids, stream.read(0, len(stream)))
        ends = sum(len(sample["ends.bin"]) // 4 for sample in samples)
        assert ends == stream.num_documents
        assert len(shards) > 1
    gc.collect()


@pytest.mark.parametrize(("added", "dtype", "vocab_size"), [("<last>", "<u2", 65_536), ("<one more>", "<u4", 65_537)])
def test_the_type_of_ids_around_65536(store, tmp_path, work_dir, added, dtype, vocab_size):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*alphabet, *(f"filler {i}" for i in range(vocab_size - 258))])}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens([EOS])
    tokenizer.add_tokens([AddedToken(added, special=False)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    path = write_jsonl(tmp_path / "a.jsonl", [f"x {added}", f"{added}{added}", "y"])
    result = prepare_small(store, work_dir, path, tokenizer=tmp_path / "tokenizer.json")
    dataset = open_result(store, result)
    assert (dataset.manifest.body["dtype"], dataset.vocab_size) == (dtype, vocab_size)
    documents = documents_of(dataset, "train", tmp_path) + documents_of(dataset, "validation", tmp_path)
    assert [vocab_size - 1] * 2 + [vocab_size - 2] in documents
    assert max(map(max, documents)) == vocab_size - 1


def test_the_last_block_is_short_and_a_document_may_span_blocks(store, tmp_path, work_dir, small_tokenizer):
    path = write_jsonl(tmp_path / "a.jsonl", ["the river " * 500, "mill", "wheel"])
    layout = Layout(block_tokens=128)
    dataset = open_result(store, prepare_small(store, work_dir, path, tokenizer=small_tokenizer, layout=layout))
    blocks = store.read_json(f"units/{unit_keys(dataset)[0]}/COMMIT.json")["body"]["blocks"]["train"]
    assert len(blocks) > 3
    assert {block["tokens"] for block in blocks[:-1]} == {128}
    assert 0 < blocks[-1]["tokens"] < 128
    tokenizer = Tokenizer.from_file(str(small_tokenizer))
    texts = [tokenizer.decode(ids[:-1]) for ids in documents_of(dataset, "train", tmp_path / "cache")]
    assert "the river " * 500 in texts


def test_begin_tokens_are_added_on_request(store, tmp_path, work_dir):
    write_files(tmp_path / "text", 20)
    config = TokenizerConfig(vocab_size=300, add_bos=True)
    dataset = open_result(store, prepare_small(store, work_dir, tmp_path / "text", tokenizer=config))
    documents = documents_of(dataset, "train", tmp_path / "cache")
    assert (dataset.eos_id, dataset.bos_id) == (0, 1)
    assert all(ids[0] == 1 and ids.count(1) == 1 and ids[-1] == 0 and ids.count(0) == 1 for ids in documents)
    assert dataset.token_bytes()[[0, 1]].tolist() == [0, 0]


def test_copies_of_a_document_fall_on_the_same_side(store, tmp_path, work_dir, small_tokenizer):
    texts = [f"document {i % 50} of the mill" for i in range(200)]
    path = write_jsonl(tmp_path / "a.jsonl", texts)
    (tmp_path / "more").mkdir()
    for i in range(50):
        (tmp_path / f"more/{i}.txt").write_text(f"document {i} of the mill")
    both = {"inputs": ({"path": str(path)}, {"path": str(tmp_path / "more")})}
    dataset = open_result(store, prepare_small(store, work_dir, path, tokenizer=small_tokenizer, **both))
    sides = [{tuple(ids) for ids in documents_of(dataset, split, tmp_path)} for split in ("train", "validation")]
    assert sides[0].isdisjoint(sides[1])
    assert len(sides[0]) + len(sides[1]) == 50
    assert dataset.counts.documents == 250


# -------------------------------------------------------------------------------------------------- bytes and keys


GOLDEN = Path(__file__).with_name("golden.json")


def golden_corpus(folder: Path) -> None:
    """A fixed corpus: small files, a jsonl file in two ranges, an empty and a broken document."""
    (folder / "sub").mkdir(parents=True)
    (folder / "one.txt").write_bytes(b"\xef\xbb\xbfThe old mill.\n")
    (folder / "sub/two.txt").write_bytes("naïve cafés 水 車\r\n".encode() * 40)
    (folder / "empty.txt").write_bytes(b"")
    (folder / "broken.txt").write_bytes(b"\xff\xfe")
    write_jsonl(folder / "large.jsonl", [f"line {i} {EOS} of the river" for i in range(1500)])


def golden_tokenizer(path: Path) -> Path:
    """A tokenizer written down here: how one is trained or saved is another matter."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [["t", "h"], ["th", "e"], ["Ġ", "the"], ["i", "n"], ["r", "i"], ["e", "r"]]
    tokens = [*alphabet, *("".join(pair) for pair in merges)]
    added = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    document = {
        "version": "1.0",
        "added_tokens": [{"id": len(tokens), "content": EOS, **added}],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": {token: i for i, token in enumerate(tokens)}, "merges": merges},
    }
    path.write_text(json.dumps(document, sort_keys=True))
    return path


def test_golden_bytes(store, tmp_path, work_dir):
    """Every stored byte of a fixed corpus. A change here means a new LOGIC_VERSION: all users build all units anew.

    After raising it, write what `store_digests` returns to golden.json.
    """
    golden_corpus(tmp_path / "text")
    tokenizer = golden_tokenizer(tmp_path / "tokenizer.json")
    layout = Layout(block_tokens=4096, shard_bytes=32768)
    options = {"name": "golden", "on_error": "skip", "range_bytes": 2**16, "validation_fraction": 0.05}
    result = prepare_small(store, work_dir, tmp_path / "text", tokenizer=tokenizer, layout=layout, **options)
    assert result.counts.skipped == {"empty": 1, "invalid_utf8": 1}
    assert store_digests(store, "units", "datasets", "tokenizers") == json.loads(GOLDEN.read_text())


DRIVER = """
import json, sys
from pathlib import Path
sys.path[:0] = [{root!r}]
from headrace.storage import Storage
from tests.data_prep.corpus import prepare_small
store = Storage.open({store!r})
result = prepare_small(store, Path({work!r}), {text!r}, tokenizer={tokenizer!r}, processes={processes})
print(json.dumps([result.digest, result.units_built, result.units_reused]))
"""


def driver(tmp_path: Path, store: str, text: Path, tokenizer: Path | None, processes: int = 1) -> list[str]:
    code = DRIVER.format(
        root=str(Path(__file__).parents[2]),
        store=str(tmp_path / store),
        work=str(tmp_path / "work"),
        text=str(text),
        tokenizer=str(tokenizer) if tokenizer else None,
        processes=processes,
    )
    return [sys.executable, "-c", code]


def test_bytes_do_not_depend_on_processes_or_the_hash_seed(tmp_path):
    write_files(tmp_path / "text", 12)
    seeds = {"one": ("1", 1), "four": ("2", 4)}
    for name, (seed, processes) in seeds.items():
        command = driver(tmp_path, name, tmp_path / "text", None, processes)
        subprocess.run(command, check=True, env=os.environ | {"PYTHONHASHSEED": seed}, stdout=subprocess.DEVNULL)
    one, four = (store_digests(Storage.open(tmp_path / name), "units", "datasets", "tokenizers") for name in seeds)
    assert one == four
    assert len(one) > 20


# --------------------------------------------------------------------------------------------------- reuse and faults


def test_again_nothing_is_written(store, tmp_path, work_dir):
    write_files(tmp_path / "text", 30)
    first = prepare_small(store, work_dir, tmp_path / "text")
    before = {key: store.local_path(key).stat().st_mtime_ns for key in store.list()}
    again = prepare_small(store, work_dir, tmp_path / "text")
    assert {key: store.local_path(key).stat().st_mtime_ns for key in store.list()} == before
    assert (again.units_built, again.units_reused) == (0, first.units_built)
    assert not again.tokenizer_trained
    assert again.digest == first.digest
    assert list(work_dir.glob("*")) == []


def test_one_changed_file_builds_one_unit(store, tmp_path, work_dir, small_tokenizer):
    texts = write_files(tmp_path / "text", 200, words=800)
    options = {"tokenizer": small_tokenizer, "validation_fraction": 0.1}
    first = prepare_small(store, work_dir, tmp_path / "text", **options)
    units = units_on(store)
    name = sorted(texts)[7]
    (tmp_path / "text" / name).write_text(texts[name] + " changed")
    second = prepare_small(store, work_dir, tmp_path / "text", **options)
    assert (second.units_built, second.units_reused) == (1, first.units_built - 1)
    assert len(units_on(store) - units) == 1
    assert second.dataset_key != first.dataset_key
    # and back again: nothing to do, the old dataset is found
    (tmp_path / "text" / name).write_text(texts[name])
    third = prepare_small(store, work_dir, tmp_path / "text", **options)
    assert (third.units_built, third.digest) == (0, first.digest)


def test_a_trained_tokenizer_is_kept_until_its_generation_is_raised(store, tmp_path, work_dir):
    write_files(tmp_path / "text", 30)
    first = prepare_small(store, work_dir, tmp_path / "text")
    (tmp_path / "text/new.txt").write_text("quite other words zzz qqq " * 100)
    second = prepare_small(store, work_dir, tmp_path / "text")
    assert second.tokenizer_digest == first.tokenizer_digest
    assert second.units_built <= 2
    newer = TokenizerConfig(vocab_size=300, generation=2)
    third = prepare_small(store, work_dir, tmp_path / "text", tokenizer=newer)
    assert third.tokenizer_trained
    assert third.tokenizer_digest != first.tokenizer_digest


def test_a_unit_whose_file_is_gone_is_built_again(store, tmp_path, work_dir, small_tokenizer, caplog):
    write_files(tmp_path / "text", 30)
    first = prepare_small(store, work_dir, tmp_path / "text", tokenizer=small_tokenizer)
    before = store_digests(store, "units", "datasets")
    gone = next(key for key in before if key.endswith(".tar"))
    store.delete(gone)
    again = prepare_small(store, work_dir, tmp_path / "text", tokenizer=small_tokenizer)
    assert again.units_built == 1
    assert "The unit is built again" in caplog.text
    assert (again.digest, store_digests(store, "units", "datasets")) == (first.digest, before)


def test_a_killed_builder_leaves_nothing_half_done_and_the_rerun_gives_the_same(tmp_path, work_dir, monkeypatch):
    write_files(tmp_path / "text", 12)
    clean = Storage.open(tmp_path / "clean")
    expected = prepare_small(clean, work_dir, tmp_path / "text")
    store = Storage.open(tmp_path / "store")
    plan_fault(tmp_path, monkeypatch, point="unit.before_commit", action="kill")
    with pytest.raises(Retryable, match=r"The process that tokenised .* was killed by signal 9.*run the same command"):
        prepare_small(store, work_dir, tmp_path / "text", processes=2)
    assert len(units_on(store)) < expected.units_built
    assert store.list("datasets") == []
    unfinished = next(f.name for f in (tmp_path / "store/units").iterdir() if f.name not in units_on(store))
    killed_while_writing(tmp_path / "store/units" / unfinished / "x")
    killed_while_writing(tmp_path / "store/tokenizers/x")
    again = prepare_small(store, work_dir, tmp_path / "text")
    assert again.digest == expected.digest
    assert again.units_reused + again.units_built == expected.units_built
    assert store_digests(store, "units", "datasets", "tokenizers") == store_digests(
        clean, "units", "datasets", "tokenizers"
    )
    assert list((tmp_path / "store").rglob(".headrace-tmp-*")) == []
    assert list(work_dir.glob("*")) == []


def test_builders_end_with_their_parent(tmp_path, monkeypatch):
    from headrace.process import descendants, pid_alive

    write_files(tmp_path / "text", 12)
    plan_fault(tmp_path, monkeypatch, point="unit.before_commit", action="sleep", seconds=120, always=True)
    parent = subprocess.Popen(driver(tmp_path, "store", tmp_path / "text", None, 2))
    try:
        wait_until(lambda: len(list((tmp_path / "store/units").glob("*/*.documents.bin"))) >= 2)
        workers = descendants(parent.pid)
        assert len(workers) == 2
    finally:
        parent.kill()
        parent.wait()
    wait_until(lambda: not any(pid_alive(pid) for pid in workers))
    # what the killed process left in its scratch folder goes with the next one
    assert len(list((tmp_path / "work").glob("prepare-*"))) == 1
    monkeypatch.delenv("HEADRACE_FAULTS")
    store = Storage.open(tmp_path / "store")
    assert prepare_small(store, tmp_path / "work", tmp_path / "text").counts.documents == 12
    assert list((tmp_path / "work").glob("*")) == []


def wait_until(condition, seconds: float = 60) -> None:
    import time

    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)


def test_two_started_together_build_each_unit_once(tmp_path, monkeypatch):
    write_files(tmp_path / "text", 12)
    # the first to come is slow enough for the other to arrive
    plan_fault(tmp_path, monkeypatch, point="unit.before_commit", action="sleep", seconds=3)
    command = driver(tmp_path, "store", tmp_path / "text", None)
    both = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(2)]
    answers = [json.loads(process.communicate(timeout=120)[0]) for process in both]
    assert [process.returncode for process in both] == [0, 0]
    total = len(units_on(Storage.open(tmp_path / "store")))
    assert sorted(built for _, built, _ in answers) == [0, total]
    assert len({digest for digest, _, _ in answers}) == 1


def test_a_waiting_prepare_says_whom_it_waits_for(store, tmp_path, work_dir):
    import threading

    from headrace.lease import hold

    write_files(tmp_path / "text", 5)
    notes: list[PrepareProgress] = []
    prepare_small(store, work_dir, tmp_path / "text", progress=notes.append)
    held = threading.Event()
    (tmp_path / "text/new.txt").write_text("new text of the mill")

    def watch(progress: PrepareProgress) -> None:
        notes.append(progress)
        if progress.note:
            held.set()

    import data_prep.prepare

    keys = []
    real = data_prep.prepare._Preparation._lease_key
    data_prep.prepare._Preparation._lease_key = lambda self: keys.append(real(self)) or keys[-1]
    try:
        prepare_small(store, work_dir, tmp_path / "text", progress=watch)
        (tmp_path / "text/newer.txt").write_text("newer text of the mill")
        with hold(store, keys[0]):
            thread = threading.Thread(
                target=prepare_small, args=(store, work_dir, tmp_path / "text"), kwargs={"progress": watch}
            )
            thread.start()
            assert held.wait(30)
        thread.join()
    finally:
        data_prep.prepare._Preparation._lease_key = real
    assert any(f"Process {os.getpid()} on" in p.note and "waiting for it" in p.note for p in notes)


def test_progress_adds_up(store, tmp_path, work_dir):
    write_files(tmp_path / "text", 20)
    told: list[PrepareProgress] = []
    result = prepare_small(store, work_dir, tmp_path / "text", progress=told.append)
    assert list(dict.fromkeys(p.stage for p in told)) == ["hash", "tokenizer", "units", "done"]
    last = [p for p in told if p.stage == "units"][-1]
    assert (last.units_done, last.units_total, last.units_reused) == (result.units_built, result.units_built, 0)
    assert (last.documents, last.tokens) == (result.counts.documents, result.counts.tokens)
    assert last.text_bytes == sum(counts.text_bytes for counts in result.counts.splits.values())
    assert last.bytes_total == last.text_bytes


def test_vocabulary_of_the_small_tokenizer_is_what_the_tests_assume():
    assert train_small().get_vocab_size() == 300
