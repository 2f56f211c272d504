"""Faults fire where the plan says, once over all processes, and cost nothing without a plan."""

import json
import math
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from headrace import faults
from headrace.errors import StorageUnavailable
from headrace.faults import InjectedFault, fault_factor, fault_point, register
from headrace.storage import Storage


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Make a plan of these faults the one in the environment; return its folder."""
    folder = tmp_path / "faults"
    folder.mkdir()
    monkeypatch.delenv("RANK", raising=False)

    def make(*entries: dict[str, Any]) -> Path:
        path = tmp_path / f"plan-{len(list(tmp_path.iterdir()))}.json"
        path.write_text(json.dumps({"dir": str(folder), "faults": list(entries)}))
        monkeypatch.setenv("HEADRACE_FAULTS", str(path))
        return folder

    return make


def test_without_a_plan(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(faults, "_load", None)
    for value in (None, ""):
        if value is None:
            monkeypatch.delenv("HEADRACE_FAULTS", raising=False)
        else:
            monkeypatch.setenv("HEADRACE_FAULTS", value)
        fault_point("step.middle", step=1)
        register("flow")


def test_fires_once(plan):
    folder = plan({"point": "commit.before", "action": "raise"})
    fault_point("commit.after")
    with pytest.raises(InjectedFault, match=r"commit\.before"):
        fault_point("commit.before", step=1)
    fault_point("commit.before", step=2)
    assert [path.name for path in folder.iterdir()] == ["fired-0"]


def test_fires_always(plan):
    plan({"point": "commit.before", "action": "raise", "always": True})
    for _ in range(3):
        with pytest.raises(InjectedFault):
            fault_point("commit.before")


def test_the_context_must_match(plan, monkeypatch: pytest.MonkeyPatch):
    plan({"point": "step.middle", "step": 40, "rank": 1, "action": "raise", "always": True})
    fault_point("step.middle")
    fault_point("step.middle", step=40)
    fault_point("step.middle", step=40, rank=0)
    fault_point("step.middle", step=41, rank=1)
    with pytest.raises(InjectedFault):
        fault_point("step.middle", step=40, rank=1, more="context")
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(InjectedFault):
        fault_point("step.middle", step=40)
    fault_point("step.middle", step=40, rank=0)


def test_storage_writes_are_points(plan, tmp_path: Path):
    (tmp_path / "local").write_bytes(b"x")
    storage = Storage.open("memory://test-faults")
    plan(
        {
            "point": "storage.write",
            "key": "runs/*.json",
            "action": "raise",
            "error": "StorageUnavailable",
            "always": True,
        }
    )
    for use in (
        lambda key: storage.write_bytes(key, b"x"),
        lambda key: storage.create(key, b"x"),
        lambda key: storage.put_file(tmp_path / "local", key),
    ):
        with pytest.raises(StorageUnavailable, match=r"Injected fault at storage\.write"):
            use("runs/1/a.json")
        assert not storage.exists("runs/1/a.json")
        use("runs/1/a.bin")


def test_several_faults_at_one_point(plan):
    folder = plan(
        {"point": "p", "action": "sleep", "seconds": 0},
        {"point": "p", "action": "raise"},
        {"point": "q", "action": "raise"},
    )
    with pytest.raises(InjectedFault):
        fault_point("p")
    assert sorted(path.name for path in folder.iterdir()) == ["fired-0", "fired-1"]


def test_sleep(plan, monkeypatch: pytest.MonkeyPatch):
    slept: list[float] = []
    monkeypatch.setattr("headrace.faults.time.sleep", slept.append)
    plan({"point": "storage.write", "action": "sleep", "seconds": 5, "always": True})
    fault_point("storage.write", key="a")
    fault_point("storage.write", key="b")
    assert slept == [5.0, 5.0]


def test_a_value_is_scaled_where_the_plan_says_so(plan):
    assert fault_factor("step.loss", step=3) == 1.0
    plan(
        {"point": "step.loss", "step": 3, "action": "scale", "factor": 4},
        {"point": "step.loss", "step": 3, "action": "scale", "factor": 0.5, "always": True},
        {"point": "step.loss", "step": 4, "action": "scale", "factor": "nan"},
    )
    assert [fault_factor("step.loss", step=step) for step in (2, 3, 3)] == [1.0, 2.0, 0.5]
    assert math.isnan(fault_factor("step.loss", step=4))


def test_a_plan_is_read_once_and_a_new_one_is_seen(plan):
    plan({"point": "p", "action": "raise"})
    with pytest.raises(InjectedFault):
        fault_point("p")
    plan({"point": "unused", "action": "raise"}, {"point": "q", "action": "raise"})
    Path(os.environ["HEADRACE_FAULTS"]).chmod(0o600)
    with pytest.raises(InjectedFault):
        fault_point("q")
    Path(os.environ["HEADRACE_FAULTS"]).unlink()
    fault_point("p")


def test_a_plan_with_an_unknown_action(plan):
    plan({"point": "p", "action": "explode"})
    with pytest.raises(ValueError, match="'explode' is none of kill, sleep, raise, scale"):
        fault_point("p")


def run(script: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True)


def test_kill_self(plan):
    plan({"point": "commit.before", "action": "kill"})
    script = """
        from headrace.faults import fault_point
        print("before", flush=True)
        fault_point("commit.before")
        print("after", flush=True)
    """
    process = run(script)
    assert process.communicate(timeout=60)[0] == "before\n"
    assert process.returncode == -signal.SIGKILL
    process = run(script)
    assert process.communicate(timeout=60)[0] == "before\nafter\n"
    assert process.returncode == 0


@pytest.mark.parametrize("role", ["flow", "rank:1"])
def test_kill_another(plan, role: str):
    folder = plan({"point": "commit.before", "action": "kill", "target": role})
    process = run(f"""
        import time
        from headrace.faults import register
        register({role!r})
        print("ready", flush=True)
        time.sleep(60)
    """)
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.readline() == "ready\n"
    assert (folder / f"{role}.pid").read_text() == str(process.pid)
    fault_point("commit.before")
    assert process.wait(60) == -signal.SIGKILL
