"""Attempts with nothing replaced: agent, torchrun, two ranks, a dataset, checkpoints."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.events import read_events
from headrace.process import pid_alive
from headrace.storage import Storage
from tests.training.checkpoint.saved import plan_faults
from tests.training.test_main import attempt_of, run_of
from training.checkpoint.catalog import list_commits
from training.launch.supervisor import run_attempt

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def environment(monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path / "home"))


def launch(text_dataset, run, tmp_path, should_stop=lambda: False):
    """Launch the next attempt; its outcome, and the processes that it had."""
    spec = attempt_of(text_dataset, run, tmp_path / "work")
    storage = Storage.open(text_dataset.root)
    outcome = run_attempt(storage, spec, on_event=lambda event: None, should_stop=should_stop)
    processes = json.loads((spec.work_path / "processes.json").read_text())
    assert len(processes) >= 4
    assert not [p for p in processes if pid_alive(p["pid"], p["start_time"])]
    return spec, outcome


def launch_and_lose_a_rank(text_dataset, run, tmp_path, monkeypatch):
    kill = {"point": "step.middle", "step": 3, "rank": 1, "action": "kill"}
    monkeypatch.setenv("HEADRACE_FAULTS", plan_faults(tmp_path / "faults", kill))
    return launch(text_dataset, run, tmp_path)


def test_a_killed_rank_is_named(text_dataset, tmp_path, monkeypatch):
    _, outcome = launch_and_lose_a_rank(text_dataset, run_of(text_dataset, "e"), tmp_path, monkeypatch)
    assert (outcome.kind, outcome.error_kind, outcome.rank, outcome.step) == ("failed", "SIGKILL", 1, 2)
    assert "Rank 1 was killed by SIGKILL after step 2, in phase 'forward_backward'." in outcome.message
    assert Path(outcome.log).is_file()
    assert {path.stem for path in (tmp_path / "faults").glob("*.pid")} == {"agent", "torchrun", "rank:0", "rank:1"}


@pytest.mark.slow
def test_the_attempt_after_a_killed_rank_finishes_the_run(text_dataset, tmp_path, monkeypatch):
    run = run_of(text_dataset, "c")
    launch_and_lose_a_rank(text_dataset, run, tmp_path, monkeypatch)
    again, outcome = launch(text_dataset, run, tmp_path)
    assert (outcome.kind, outcome.step) == ("finished", 4)
    storage = Storage.open(text_dataset.root)
    assert list_commits(storage, run.run_prefix)[0].step == 4
    told = [e["kind"] for e in read_events(storage, run.run_prefix, again.attempt)]
    assert told[-3:] == ["save.committed", "finished", "attempt.ended"]


@pytest.mark.slow
def test_a_stop_saves_where_it_is(text_dataset, tmp_path):
    run = run_of(text_dataset, "f", training={"steps": 10_000}, checkpoint={"save_every": 5000})
    stop_after = tmp_path / "work" / run.run_id / "attempt-0001" / "events.jsonl"

    def should_stop():
        return stop_after.is_file() and '"step": 5,' in stop_after.read_text()

    _, outcome = launch(text_dataset, run, tmp_path, should_stop)
    assert outcome.kind == "stopped"
    newest = list_commits(Storage.open(text_dataset.root), run.run_prefix)[0]
    assert newest.step == outcome.step >= 5


@pytest.mark.slow
def test_an_error_of_all_ranks_is_told_once_and_not_tried_again(text_dataset, tmp_path):
    run = run_of(text_dataset, "d", model={"vocab_size": 20})
    _, outcome = launch(text_dataset, run, tmp_path)
    assert (outcome.kind, outcome.error_kind, outcome.retryable) == ("failed", "ConfigError", False)
    assert "model.vocab_size is 20" in outcome.message


def test_torchrun_ends_at_once_when_its_parent_is_gone_already(tmp_path):
    command = [sys.executable, "-m", "training.torchrun", str(os.getppid()), str(tmp_path / "failures.json"), "--help"]
    assert subprocess.run(command, cwd=ROOT, check=False).returncode == -signal.SIGKILL


@pytest.mark.slow
def test_a_hang_names_the_call_in_which_the_odd_rank_is(text_dataset, tmp_path, monkeypatch):
    """Rank 1 sleeps in a step; rank 0 waits for it in a collective, and must not be taken for the cause."""
    hang = {"point": "step.middle", "step": 8, "rank": 1, "action": "sleep", "seconds": 600}
    monkeypatch.setenv("HEADRACE_FAULTS", plan_faults(tmp_path / "faults", hang))
    run = run_of(text_dataset, "9", training={"steps": 20}, launch={"hang_timeout_seconds": 8.0})
    spec, outcome = launch(text_dataset, run, tmp_path)
    assert (outcome.kind, outcome.error_kind, outcome.step) == ("failed", "Hang", 7)
    assert " Rank 1 is in _fire (" in outcome.message
    assert "; rank 0 is in " in outcome.message
    storage = Storage.open(text_dataset.root)
    stored = storage.read_bytes(f"{run.run_prefix}/stacks/attempt-{spec.attempt:04d}/rank-1.txt").decode()
    assert "in fault_point" in stored
    assert "in train" in stored
