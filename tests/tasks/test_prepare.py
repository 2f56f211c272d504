"""What the stage `prepare` shows; that it prepares is shown with `data_prep`."""

import io
import re
from types import SimpleNamespace

import pytest

from data_prep.dataset import DatasetCounts, PrepareProgress, PrepareResult
from data_prep.units import Counts
from headrace.errors import InputError
from headrace.terminal import Terminal
from tasks.console import showing_on, terminal
from tasks.prepare import prepare, summary

RESULT = PrepareResult(
    dataset_key="tiny-1",
    digest="d" * 64,
    tokenizer_key="t",
    tokenizer_digest="e" * 64,
    vocab_size=512,
    counts=DatasetCounts({"train": Counts(9, 9_000, 30_000), "validation": Counts(1, 1_000, 3_000)}, {}),
    units_built=4,
    units_reused=29,
    tokenizer_trained=True,
)


def test_the_dataset_in_one_line():
    assert summary(RESULT) == "10 documents, 10,000 tokens, 4 units built, 29 reused"


def test_what_was_skipped_is_said_with_its_reasons():
    counts = DatasetCounts(RESULT.counts.splits, {"empty": 2, "not-utf-8": 1_200})
    skipped = PrepareResult(**{**vars(RESULT), "counts": counts})
    assert summary(skipped).endswith("skipped 1,202 (empty 2, not-utf-8 1,200)")


@pytest.fixture
def space(tmp_path):
    return SimpleNamespace(storage=object(), work_dir=tmp_path)


def test_progress_is_shown_and_each_note_once(space, monkeypatch):
    def prepare_dataset(storage, data, tokenizer, *, work_dir, progress):
        assert storage is space.storage
        assert work_dir == space.work_dir / "prepare"
        progress(PrepareProgress("hash"))
        for _ in range(3):
            progress(PrepareProgress("units", note="Process 7 on b is preparing this dataset; waiting for it."))
        progress(PrepareProgress("units", 2, 4, documents=5, tokens=700, text_bytes=300, bytes_total=600))
        return RESULT

    monkeypatch.setattr("tasks.prepare.prepare_dataset", prepare_dataset)
    stream, now = io.StringIO(), iter(range(0, 1000, 10))
    with showing_on(Terminal(plain=True, stream=stream, clock=lambda: float(next(now)))):
        assert prepare.fn(space, None, None) is RESULT
    text = stream.getvalue()
    assert text.count("waiting for it") == 1
    assert re.search(r"prepare: units 2/4  50%  doing=tokenising  documents=5  tokens=700  tok/s=\S+  read=50%", text)
    assert "10 documents, 10,000 tokens, 4 units built, 29 reused" in text


def test_refused_input_passes_through(space, monkeypatch):
    def refuse(*_, **__):
        raise InputError("no matching file")

    monkeypatch.setattr("tasks.prepare.prepare_dataset", refuse)
    with pytest.raises(InputError, match="no matching file"):
        prepare.fn(space, None, None)


def test_a_worker_without_a_command_shows_lines():
    assert terminal().plain
    mine = Terminal(plain=True)
    with showing_on(mine):
        assert terminal() is mine
    assert terminal() is not mine
