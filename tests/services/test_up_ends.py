"""However `headrace up` ends, all of it ends, and nothing else; what was running is continued by the next one."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from typing import Any

import psutil
import pytest

from tests.chaos.harness import Lab
from tests.mlflow_database import NOLOAD
from tests.services.stack import DOWN_SECONDS, Up, started_up, until

pytestmark = pytest.mark.filterwarnings(NOLOAD)

SLOW = {"point": "step.middle", "action": "sleep", "seconds": 1.0, "always": True}
STOP_SECONDS = 30.0
ORPHAN_SECONDS = 10.0


def training(up: Up) -> Any:
    """Start a run through the API and return its id when a step of it is committed."""
    flow_run = up.run_deployment("pretrain/pretrain", up.lab.config)
    until(lambda: list(up.lab.store.glob("runs/*/artifacts/checkpoints/step-*/attempt-*/COMMIT.json")), "a commit")
    assert up.state(flow_run) == "Running"
    return flow_run


def continued_by_the_next(lab: Lab) -> None:
    """The next `up` takes the interrupted run to its end by itself."""
    lab.plan()
    with started_up(lab) as up, up.client() as client:
        deployment = client.read_deployment_by_name("pretrain/pretrain")

        def done() -> bool:
            runs = [run for run in client.read_flow_runs() if run.deployment_id == deployment.id]
            return any(str(run.state_name) == "Completed" for run in runs)

        until(done, "the run is continued and completes")


def kinds(processes: list[psutil.Process]) -> str:
    return " ".join(" ".join(process.cmdline()) for process in processes)


@pytest.mark.slow
def test_sigterm_lets_a_training_save_and_the_next_one_continues_it(local_lab: Lab) -> None:
    local_lab.plan(SLOW)
    with started_up(local_lab) as up:
        training(up)
        began = time.monotonic()
        up.process.send_signal(signal.SIGTERM)
        assert up.process.wait(DOWN_SECONDS) == 0
        assert time.monotonic() - began < STOP_SECONDS
        assert up.processes() == []
        assert not (local_lab.home / "services.json").exists()
        assert local_lab.command("status").returncode == 1
    saved = len(list(local_lab.store.glob("runs/*/artifacts/checkpoints/step-*/attempt-*/COMMIT.json")))
    assert saved > 0
    continued_by_the_next(local_lab)
    again = local_lab.run_to_the_end()
    assert again["step"] == 12
    assert [stage["outcome"] for stage in again["stages"]] == ["reused"] * 5
    assert again["attempts"] >= 2


def test_nothing_is_left_when_it_is_killed(local_lab: Lab) -> None:
    local_lab.plan(SLOW)
    with started_up(local_lab) as up:
        training(up)
        assert "training.main" in kinds(up.processes())
        up.process.kill()
        up.process.wait()
        deadline = time.monotonic() + ORPHAN_SECONDS
        while left := up.processes():
            assert time.monotonic() < deadline, f"still alive: {kinds(left)}"
            time.sleep(0.1)
        assert not (local_lab.home / "services.json").exists()
        told = local_lab.command("down")
        assert told.returncode == 0
        assert "does not run" in told.stderr
    continued_by_the_next(local_lab)


def test_down_ends_what_it_started_and_leaves_others_alone(local_lab: Lab, tmp_path: Any) -> None:
    foreign = subprocess.Popen(
        [sys.executable, "-m", "http.server", "0", "--bind", "127.0.0.1"],
        cwd=tmp_path,
        env={**os.environ, "HEADRACE_HOME": str(tmp_path / "other")},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        with started_up(local_lab) as up:
            ended = local_lab.command("down", "--json")
            assert ended.returncode == 0
            document = json.loads(ended.stdout)
            assert {item["name"] for item in document["ended"]} == {"up", "prefect", "mlflow", "worker"}
            assert {item["pid"] for item in document["ended"]} >= {up.pid, *(s["pid"] for s in up.document["services"])}
            assert up.process.wait(1) == 0
            assert up.processes() == []
        assert foreign.poll() is None
    finally:
        foreign.kill()
        foreign.wait()
    nothing = local_lab.command("down", "--json")
    assert (nothing.returncode, json.loads(nothing.stdout)["ended"]) == (0, [])


def test_a_taken_port_is_one_sentence(local_lab: Lab) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for option in ("--port", "--mlflow-port"):
            others = ["--mlflow-port", "0"] if option == "--port" else ["--port", "0"]
            refused = local_lab.command("up", option, port, *others)
            assert refused.returncode == 2
            assert port in refused.stderr
            assert option in refused.stderr
    assert local_lab.processes() == []


@pytest.mark.slow
def test_it_waits_for_no_command_that_has_the_database_itself(local_lab: Lab) -> None:
    local_lab.plan({"point": "step.middle", "action": "sleep", "seconds": 20.0, "step": 2})
    running = local_lab.start("run", str(local_lab.write_config()), "--json")
    try:
        until(lambda: local_lab.fired() > 0, "the training is on its way")
        refused = local_lab.command("up", "--port", "0", "--mlflow-port", "0")
        assert refused.returncode == 2
        assert "with a Prefect server of its own" in refused.stderr
    finally:
        running.kill()
        running.communicate()
    local_lab.assert_no_orphans()
