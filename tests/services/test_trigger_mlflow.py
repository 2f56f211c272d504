"""A triggered run whose MLflow server is away for half a minute in the middle of the training."""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.tracking import Tracker
from tests.chaos.harness import Lab
from tests.flows.test_mlflow_server import MlflowServer
from tests.mlflow_database import NOLOAD
from tests.services.prefect_stack import SLOW_STEPS, Stack, attempts, committed, finish, run_folder, until

pytestmark = pytest.mark.filterwarnings(NOLOAD)

STEPS = 12
AWAY_SECONDS = 30.0


@pytest.fixture
def mlflow(tmp_path: Path) -> Iterator[MlflowServer]:
    folder = tmp_path / "mlflow"
    folder.mkdir()
    server = MlflowServer(folder)
    server.start()
    yield server
    server.close()


@pytest.mark.slow
def test_half_a_minute_without_mlflow_loses_no_value(stack: Stack, local_lab: Lab, mlflow: MlflowServer) -> None:
    local_lab.plan(SLOW_STEPS)
    local_lab.environment["MLFLOW_TRACKING_URI"] = mlflow.uri
    deployment = stack.deploy(local_lab, "mlflow-away")
    config = str(local_lab.write_config())
    command = stack.start(local_lab, "trigger", "--config", config, "--deployment", deployment, "--wait", "--json")
    until(lambda: committed(local_lab, 4), "step 4 is committed")

    mlflow.kill()
    time.sleep(AWAY_SECONDS)  # the outage that is tested
    mlflow.start()
    ended = finish(command)

    assert ended.returncode == 0, ended.stderr
    run_id = run_folder(local_lab).parent.name
    tracker = Tracker.connect(mlflow.uri)
    assert [point.step for point in tracker.history(run_id, "train/loss")] == list(range(1, STEPS + 1))
    assert tracker.get_run(run_id).status == "FINISHED"
    assert attempts(local_lab) == 1
    assert run_id in json.loads(ended.stdout)["pages"]["MLflow"]
