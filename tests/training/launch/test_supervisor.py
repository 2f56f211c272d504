"""One attempt with real processes: how it ends, what is said about it, and that nothing stays alive."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from headrace.errors import AttemptFailed, ConfigError, Terminal
from headrace.events import read_events
from headrace.process import pid_alive
from headrace.storage import Storage
from tests.training.checkpoint.saved import claim
from tests.training.checkpoint.test_catalog import commit
from tests.training.launch.stand_ins import MODULE
from tests.training.toy import run_spec
from training.launch import supervisor
from training.launch.supervisor import run_attempt

ROOT = Path(__file__).parents[3]
ORPHAN_SECONDS = 10


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch):
    monkeypatch.setattr(supervisor, "AGENT_MODULE", MODULE)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@pytest.fixture
def prepare(tmp_path):
    """`prepare({1: {"act": "kill"}}, hang_timeout_seconds=...)`: an attempt whose ranks do as they are told."""

    def prepared(script, **launch):
        run = run_spec(launch={"ranks_per_node": 2, "stop_grace_seconds": 5.0, **launch}, training={"steps": 50})
        spec = claim(tmp_path, run)
        spec.write()
        (spec.work_path / "script.json").write_text(json.dumps(script), encoding="utf-8")
        return spec

    return prepared


def pids_of(spec):
    return {path.name: int(path.read_text()) for path in (spec.work_path / "pids").glob("[!.]*")}


def assert_nothing_alive(spec, seconds=ORPHAN_SECONDS):
    deadline = time.monotonic() + seconds
    while alive := {role: pid for role, pid in pids_of(spec).items() if pid_alive(pid)}:
        assert time.monotonic() < deadline, f"still alive: {alive}"
        time.sleep(0.05)


def run(spec, on_event=lambda event: None, should_stop=lambda: False):
    outcome = run_attempt(Storage.open(spec.storage_root), spec, on_event=on_event, should_stop=should_stop)
    assert_nothing_alive(spec, seconds=0.5)
    return outcome


def wait_for(condition, seconds=20):
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)
    return found


def reached(spec, step):
    try:
        beats = [json.loads(spec.heartbeat_path(rank).read_text()) for rank in range(2)]
    except FileNotFoundError:
        return False
    return min(beat["step"] for beat in beats) >= step


def test_an_attempt_that_finishes(prepare):
    spec = prepare({})
    seen = []
    outcome = run(spec, on_event=seen.append)
    assert (outcome.kind, outcome.step) == ("finished", 3)
    assert outcome.error() is None
    assert [(event["kind"], event["step"]) for event in seen] == [
        ("step", 1),
        ("step", 2),
        ("step", 3),
        ("attempt.ended", 3),
    ]
    assert read_events(Storage.open(spec.storage_root), spec.run.run_prefix, 1) == seen


@pytest.mark.parametrize(
    ("script", "kind", "rank", "words"),
    [
        ({0: {"act": "echo"}, 1: {"act": "fail"}}, "ValueError", 1, "Rank 1 failed after step 3: ValueError: a number"),
        ({0: {"act": "echo"}, 1: {"act": "kill"}}, "SIGKILL", 1, "killed by SIGKILL after step 3, in phase 'forward_b"),
        ({0: {"act": "vanish"}, 1: {"act": "wait"}}, "UnexplainedExit", 0, "Rank 0 ended with exit code 7"),
        ({0: {"act": "alone"}, 1: {"act": "wait"}}, "RuntimeError", 0, "an echo: no rank said what happened first"),
    ],
)
def test_the_root_cause_is_named(prepare, script, kind, rank, words):
    outcome = run(prepare(script))
    assert (outcome.kind, outcome.error_kind, outcome.rank, outcome.retryable) == ("failed", kind, rank, True)
    assert words in outcome.message
    assert ("no kill for lack of memory, so somebody" in outcome.message) == (kind == "SIGKILL")
    assert isinstance(outcome.error(), AttemptFailed)


def test_an_error_that_a_retry_cannot_cure_keeps_its_kind(prepare):
    outcome = run(prepare({0: {"act": "refuse"}, 1: {"act": "refuse"}}))
    assert not outcome.retryable
    error = outcome.error()
    assert isinstance(error, ConfigError)
    assert "ranks do not divide" in str(error)
    assert type(outcome.model_copy(update={"error_kind": "Unheard"}).error()) is Terminal


WHERE = {
    "freeze": "Rank 1 does not answer: it is stopped, or stuck in the kernel. Rank 0 is in run (",
    "breed": "Rank 1 is in hang (",
    "grip": "Rank 1 is in grip (",
}


@pytest.mark.parametrize("act", list(WHERE))
def test_a_silent_rank_is_a_hang_and_everything_is_ended(prepare, act):
    spec = prepare({0: {"act": "wait"}, 1: {"act": act, "after": 8}}, hang_timeout_seconds=1.0)
    outcome = run(spec)
    assert (outcome.kind, outcome.error_kind, outcome.rank, outcome.step) == ("failed", "Hang", 1, 8)
    assert outcome.message.startswith("Rank 1 hangs in phase 'forward_backward' after step 8: silent for 1 s")
    assert WHERE[act] in outcome.message
    if act != "freeze":
        assert "; rank 0 is in run (" in outcome.message
        stored = Storage.open(spec.storage_root).read_bytes(f"{spec.run.run_prefix}/stacks/attempt-0001/rank-1.txt")
        assert f"in {WHERE[act].split()[4]}".encode() in stored
    if act == "breed":
        assert "child-1" in pids_of(spec)


def test_a_stop_lets_the_ranks_save(prepare):
    spec = prepare({0: {"act": "wait"}, 1: {"act": "wait"}})
    outcome = run(spec, should_stop=lambda: reached(spec, 5))
    assert outcome.kind == "stopped"
    assert outcome.step >= 5
    assert outcome.error() is None


def test_a_stop_before_the_ranks_are_there_ends_at_once(prepare):
    outcome = run(prepare({0: {"act": "wait"}, 1: {"act": "wait"}}), should_stop=lambda: True)
    assert (outcome.kind, outcome.step) == ("stopped", None)


def test_ranks_that_do_not_stop_are_killed_after_the_grace_time(prepare):
    spec = prepare({0: {"act": "wait", "deaf": True}, 1: {"act": "wait", "deaf": True}}, stop_grace_seconds=0.5)
    outcome = run(spec, should_stop=lambda: reached(spec, 5))
    assert outcome.kind == "stopped"
    assert "had not saved within 0.5 s (launch.stop_grace_seconds)" in outcome.message


def killed_when_running(spec, role):
    """A callback that kills a process of the attempt once it runs."""
    done = []

    def should_stop():
        if not done and reached(spec, 5):
            done.append(role)
            os.kill(pids_of(spec)[role], signal.SIGKILL)
        return False

    return should_stop


@pytest.mark.parametrize(
    ("role", "kind", "words"),
    [
        ("torchrun", "TorchrunEnded", "torchrun was killed by SIGKILL."),
        ("agent", "AgentEnded", "The agent of attempt 1 was killed by SIGKILL."),
        ("rank-0", "SIGKILL", "Rank 0 was killed by SIGKILL after step"),
    ],
)
def test_whoever_is_killed_nothing_stays_alive(prepare, role, kind, words):
    spec = prepare({0: {"act": "wait"}, 1: {"act": "wait"}})
    outcome = run(spec, should_stop=killed_when_running(spec, role))
    assert (outcome.kind, outcome.error_kind, outcome.retryable) == ("failed", kind, True)
    assert outcome.message.startswith(words)


def test_a_killed_agent_leaves_not_even_what_ignores_its_end(prepare):
    spec = prepare({0: {"act": "breed"}, 1: {"act": "breed"}})

    def bred():
        return {"child-0", "child-1"} <= set(pids_of(spec)) and listed(spec) >= set(pids_of(spec).values())

    done = []

    def should_stop():
        if not done and bred():
            done.append(True)
            os.kill(pids_of(spec)["agent"], signal.SIGKILL)
        return False

    assert run(spec, should_stop=should_stop).error_kind == "AgentEnded"


def listed(spec):
    try:
        return {entry["pid"] for entry in json.loads((spec.work_path / "processes.json").read_text())}
    except FileNotFoundError:
        return set()


@pytest.mark.parametrize("act", ["wait", "breed"])
def test_nothing_outlives_the_process_that_wanted_the_attempt(prepare, act):
    spec = prepare({0: {"act": "wait"}, 1: {"act": act}})
    flow = subprocess.Popen([sys.executable, "-m", MODULE, "flow", str(spec.work_path / "attempt.json")])
    wait_for(lambda: reached(spec, 3) and (act == "wait" or "child-1" in pids_of(spec)))
    assert {"flow", "agent", "torchrun", "rank-0", "rank-1"} <= set(pids_of(spec))
    flow.kill()
    flow.wait()
    assert_nothing_alive(spec)
    outcome = json.loads((spec.work_path / "outcome.json").read_text())
    assert (outcome["kind"], outcome["error_kind"]) == ("failed", "ParentEnded")


def test_a_callback_that_raises_ends_the_attempt_first(prepare):
    spec = prepare({0: {"act": "wait"}, 1: {"act": "wait"}})

    def on_event(event):
        if event["step"] == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(spec, on_event=on_event)
    assert_nothing_alive(spec, seconds=0.5)
    # What the ranks had said is on the store all the same.
    assert len(read_events(Storage.open(spec.storage_root), spec.run.run_prefix, 1)) >= 5


def test_a_run_is_finished_when_its_last_step_is_committed_whatever_happens_then(prepare):
    spec = prepare({0: {"act": "kill"}})
    storage = Storage.open(spec.storage_root)
    commit(storage, 1, 50, run=spec.run)
    outcome = run(spec)
    assert (outcome.kind, outcome.step) == ("finished", 50)
    assert "Rank 0 was killed" in outcome.message
