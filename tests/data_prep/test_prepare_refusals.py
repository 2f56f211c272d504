"""What `prepare` refuses, how it says so, and that nothing half-written is visible afterwards."""

from pathlib import Path

import pytest

from data_prep.config import TokenizerConfig
from data_prep.split import Split
from headrace.digest import sha256_bytes
from headrace.errors import ConfigError, DamagedData, HeadraceError, InputError, StorageFull
from tests.data_prep.corpus import (
    open_result,
    plan_fault,
    prepare_small,
    unit_keys,
    units_on,
    write_files,
    write_jsonl,
)


def mixed(path: Path) -> Path:
    lines = [f'{{"text": "good document {i} of the mill"}}'.encode() for i in range(10)]
    bad = [
        b'{"text": "caf\xe9"}',
        b"not json",
        b'{"body": 1}',
        b'{"text": null}',
        b'{"text": ""}',
        b'{"text": "\\ud83c"}',
    ]
    path.write_bytes(b"\n".join([*lines, *bad, b'{"text": "the last one"}']))
    return path


def test_skipped_documents_are_counted_by_reason(store, tmp_path, work_dir, small_tokenizer):
    path = mixed(tmp_path / "a.jsonl")
    result = prepare_small(store, work_dir, path, tokenizer=small_tokenizer, on_error="skip")
    assert result.counts.documents == 11
    assert result.counts.skipped == {
        "empty": 1,
        "invalid_json": 1,
        "invalid_utf8": 1,
        "lone_surrogate": 1,
        "missing_text": 1,
        "not_text": 1,
    }
    assert result.counts.documents + sum(result.counts.skipped.values()) == len(path.read_bytes().split(b"\n"))


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("early", [True, False])
def test_a_document_that_must_not_be_skipped_is_named(store, tmp_path, work_dir, small_tokenizer, early, processes):
    # The beginning of the corpus is read before anything else; later faults are found by the process that tokenises.
    write_files(tmp_path / "text", 6, words=20 if early else 8000)
    path = mixed(tmp_path / "z.jsonl")
    offset = path.read_bytes().index(b"\xe9")
    options = {"tokenizer": small_tokenizer, "processes": processes, "validation_fraction": 0.4}
    options["inputs"] = ({"path": str(tmp_path / "text")}, {"path": str(path)})
    with pytest.raises(InputError, match=rf"z.jsonl, byte {offset}: byte 0xe9 is not UTF-8. Correct the file, or set"):
        prepare_small(store, work_dir, tmp_path / "text", **options)
    assert store.list("datasets") == []
    assert bool(units_on(store)) is not early


def test_empty_documents_are_no_fault(store, tmp_path, work_dir, small_tokenizer):
    path = write_jsonl(tmp_path / "a.jsonl", ["", "the mill", "the wheel", ""])
    result = prepare_small(store, work_dir, path, tokenizer=small_tokenizer, on_error="fail")
    assert (result.counts.documents, result.counts.skipped) == (2, {"empty": 2})


def test_an_empty_corpus_is_refused(store, tmp_path, work_dir, small_tokenizer):
    (tmp_path / "a.txt").write_bytes(b"")
    with pytest.raises(InputError, match=r"corpus is empty: none of its 1 files \(.*a.txt\) holds a document"):
        prepare_small(store, work_dir, tmp_path / "a.txt", tokenizer=small_tokenizer)
    assert store.list("datasets") == []


def test_a_corpus_that_is_all_validation_is_refused(store, tmp_path, work_dir, small_tokenizer):
    held = [
        text for text in (f"document {i}" for i in range(20)) if Split(0.4).is_validation(sha256_bytes(text.encode()))
    ]
    path = write_jsonl(tmp_path / "a.jsonl", held[:3])
    with pytest.raises(
        InputError,
        match=r"None of the 3 documents fell into the train split with data.validation_fraction=0.4. Give a smaller",
    ):
        prepare_small(store, work_dir, path, tokenizer=small_tokenizer, validation_fraction=0.4)


def test_tiny_corpora_work(store, tmp_path, work_dir):
    for number in (2, 5, 20):
        write_files(tmp_path / f"text{number}", number)
        result = prepare_small(store, work_dir, tmp_path / f"text{number}", validation_fraction=0.02)
        assert result.counts.documents == number
        assert all(counts.documents > 0 for counts in result.counts.splits.values())


def test_a_wrong_end_token_stops_before_anything_is_built(store, tmp_path, work_dir, small_tokenizer):
    write_files(tmp_path / "text", 5)
    config = TokenizerConfig(path=str(small_tokenizer), eos_token="</s>")
    with pytest.raises(ConfigError, match=r"tokenizer.eos_token is '</s>'"):
        prepare_small(store, work_dir, tmp_path / "text", tokenizer=config)
    assert store.list("units") == []


def test_a_full_disk_is_one_clear_sentence(store, tmp_path, work_dir, small_tokenizer, monkeypatch):
    write_files(tmp_path / "text", 5)

    def no_room(self, *args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("data_prep.shards._HashingFile.write", no_room)
        with pytest.raises(StorageFull, match=r"There is no room left below .* to build a unit. Free space and run"):
            prepare_small(store, work_dir, tmp_path / "text", tokenizer=small_tokenizer)
    assert store.list("units") == []
    assert list(work_dir.glob("*")) == []
    assert prepare_small(store, work_dir, tmp_path / "text", tokenizer=small_tokenizer).counts.documents == 5


def test_a_store_that_fails_half_way_shows_nothing_half_written(
    store, tmp_path, work_dir, small_tokenizer, monkeypatch
):
    write_files(tmp_path / "text", 5)
    plan_fault(
        tmp_path, monkeypatch, point="storage.write", key="units/*documents.bin", action="raise", error="StorageFull"
    )
    with pytest.raises(StorageFull):
        prepare_small(store, work_dir, tmp_path / "text", tokenizer=small_tokenizer)
    assert units_on(store) == set()
    assert store.list("datasets") == []


def test_a_worker_that_fails_in_another_way_is_reported(store, tmp_path, work_dir, small_tokenizer, monkeypatch, capfd):
    write_files(tmp_path / "text", 5)
    plan_fault(tmp_path, monkeypatch, point="unit.before_commit", action="raise")
    with pytest.raises(HeadraceError, match="ended with exit code 1; its last words are on standard error"):
        prepare_small(store, work_dir, tmp_path / "text", tokenizer=small_tokenizer, processes=2)
    assert "InjectedFault" in capfd.readouterr().err


def test_a_conflicting_unit_is_not_overwritten(store, tmp_path, work_dir, small_tokenizer):
    write_files(tmp_path / "text", 5)
    dataset = open_result(store, prepare_small(store, work_dir, tmp_path / "text", tokenizer=small_tokenizer))
    key = f"units/{unit_keys(dataset)[0]}/COMMIT.json"
    commit = store.read_json(key)
    commit["body"]["counts"]["train"]["tokens"] += 1
    store.write_json(key, commit)
    with pytest.raises(DamagedData, match="was changed after it was written"):
        prepare_small(store, work_dir, tmp_path / "text", tokenizer=small_tokenizer)
    store.write_bytes(key, b"{")
    with pytest.raises(DamagedData, match=r"is not a complete JSON document .*\. Move it away and run again\.$"):
        prepare_small(store, work_dir, tmp_path / "text", tokenizer=small_tokenizer)
