"""Everything that is shown, through an MLflow server with a local artifact root, which may also be away."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flows.embedded import free_port
from headrace.errors import TrackingUnavailable
from headrace.registry import Registry
from headrace.storage import Storage
from headrace.tracking import Tracker
from headrace.tracking_address import server_answers
from tasks.evaluate import evaluate
from tasks.export import export
from tasks.register import CHAMPION, register
from tasks.runs import Workspace, resolve_run
from tasks.shown import announce, bring_up_to_date, live_page
from tasks.train import TrainingSession, train
from tests.mlflow_database import NOLOAD, new_database
from tests.tasks.stand_ins import DATA, DATASET, FakeRanks, FakeStages, make_request

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings(NOLOAD)]

START_SECONDS = 120


class MlflowServer:
    """A server on a database of its own, on a port that stays the same over restarts."""

    def __init__(self, folder: Path) -> None:
        self.database = new_database(folder)
        self.port = free_port()
        self.uri = f"http://127.0.0.1:{self.port}"
        self._log = (folder / "server.log").open("ab")
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", f"sqlite:///{self.database}"]
        environment = {**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        self._process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(self.port), "--workers", "1"],
            stdout=self._log,
            stderr=self._log,
            env=environment,
            start_new_session=True,
        )
        deadline = time.monotonic() + START_SECONDS
        while not server_answers(self.uri, timeout=1.0):
            assert self._process.poll() is None, "the server ended at its start"
            assert time.monotonic() < deadline, "the server did not start"
            time.sleep(0.2)

    def kill(self) -> None:
        """End the server and its workers at once."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None
        deadline = time.monotonic() + START_SECONDS
        while self._is_open():
            assert time.monotonic() < deadline, "a worker of the server is still there"
            time.sleep(0.05)

    def _is_open(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def close(self) -> None:
        self.kill()
        self._log.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    made = MlflowServer(tmp_path_factory.mktemp("server"))
    made.start()
    yield made
    made.close()


@pytest.fixture
def space(server, tmp_path):
    return Workspace(Storage.open(tmp_path / "a store"), Tracker.connect(server.uri), tmp_path / "work")


@pytest.fixture
def ranks(monkeypatch):
    fake = FakeRanks()
    monkeypatch.setattr("tasks.train.run_attempt", fake)
    return fake


@pytest.fixture
def stages(monkeypatch, space):
    fake = FakeStages(space.storage)
    monkeypatch.setattr("tasks.export.run_module", fake)
    monkeypatch.setattr("tasks.evaluate.run_module", fake)
    return fake


def test_from_a_run_to_a_champion_that_loads_after_the_run_is_gone(space, server, ranks, stages, tmp_path):
    request = make_request(experiment="registered")
    run = resolve_run(space, request, DATASET)
    announce(space, run, request, DATASET)
    training = train.fn(space, run, TrainingSession())
    for again in (False, True):
        exported = export.fn(space, run, training, "float32")
        evaluated = evaluate.fn(space, run, exported)
        result = register.fn(space, run, exported, evaluated, "served", DATA)
        assert (result.version, result.new_version, result.champion) == ("1", not again, True)
    assert [p.step for p in space.tracker.history(run.run_id, "train/loss")] == list(range(1, 13))
    assert space.tracker.params(run.run_id)["optimizer.learning_rate"] == "0.003"
    assert live_page(space, run) == (
        f"{server.uri}/#/experiments/{run.experiment_id}/runs/{run.run_id}?workflowType=machine_learning"
    )
    files = sorted(path for path in (tmp_path / "a store").rglob("*") if path.is_file())

    space.tracker.delete_run(run.run_id)
    gc = [sys.executable, "-m", "mlflow", "gc", "--backend-store-uri", f"sqlite:///{server.database}"]
    environment = {**os.environ, "MLFLOW_TRACKING_URI": server.uri, "MLFLOW_DISABLE_TELEMETRY": "true"}
    done = subprocess.run([*gc, "--run-ids", run.run_id], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "a store" / "runs" / run.run_id / "artifacts" / "run.json").exists()
    model = Path(space.storage.local_path(exported.prefix))
    assert [path for path in files if path.is_relative_to(model) and not path.exists()] == []
    holder = Registry(space.tracker).version_by_alias("served", CHAMPION)
    assert holder is not None
    assert space.tracker.client.get_model_version_download_uri("served", holder.version)


def test_the_server_away_during_training_loses_nothing(space, server, ranks, monkeypatch):
    monkeypatch.setattr("tasks.train.FLUSH_SECONDS", 0.5)
    run = resolve_run(space, make_request(experiment="away"), DATASET)
    ranks.ends = [6]
    real = FakeRanks.__call__

    def with_the_server_away(self, *arguments, **callbacks):
        server.kill()
        return real(self, *arguments, **callbacks)

    monkeypatch.setattr(FakeRanks, "__call__", with_the_server_away)
    with pytest.raises(Exception, match="killed"):
        train.fn(space, run, TrainingSession())
    with pytest.raises(TrackingUnavailable, match="does not answer"):
        Tracker.connect(server.uri)
    server.start()
    monkeypatch.setattr(FakeRanks, "__call__", real)
    train.fn(space, run, TrainingSession())
    bring_up_to_date(space, run)
    assert [p.step for p in space.tracker.history(run.run_id, "train/loss")] == list(range(1, 13))
    children = space.tracker.children(run.experiment_id, run.run_id)
    assert sorted(child.status for child in children) == ["FINISHED", "KILLED"]


def test_an_answer_that_is_lost_on_the_way_is_stored_once(space, ranks):
    from headrace.tracking import Point

    experiment = space.tracker.ensure_experiment("lost", str(space.storage.local_path("runs")))
    run_id = space.tracker.create_run(experiment, "r", tags={}).run_id
    points = [Point("x", 1.0 / step, step, 1_000 + step) for step in range(1, 2_001)]
    for _ in range(2):
        space.tracker.log_points(run_id, points)
    assert space.tracker.history(run_id, "x") == points


def test_the_ui_command_says_where_a_server_runs_already(server, monkeypatch, capfd):
    from flows.cli import execute

    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.uri)
    assert execute(["ui"]) == 0
    assert f"{server.uri}/#/experiments?workflowType=machine_learning\n" == capfd.readouterr().out
