"""Kill any process of a run at any named point: the command, or the same command again, ends with the same weights.

One run is killed many times, at steps that follow each other: what has to be true is true of the whole history.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from mlflow import MlflowClient

from tests.chaos.conftest import STEPS
from tests.chaos.harness import Lab, final_tensors
from tests.mlflow_database import NOLOAD

pytestmark = [pytest.mark.chaos, pytest.mark.filterwarnings(NOLOAD)]

SAVE_EVERY = 3
SLOW_STEPS = {"point": "step.middle", "action": "sleep", "seconds": 0.25, "always": True}
"""A save takes as long as many of these tiny steps: slowed, each save is committed before the next one is due."""
TRAIN_POINTS = ("step.middle", "save.begun", "save.files_written", "commit.before", "commit.after")
TARGETS = ("rank:0", "rank:1", "torchrun", "flow")
LATER_POINTS = (
    "export.begun",
    "export.files_written",
    "evaluate.begun",
    "version.before",
    "version.after",
    "alias.before",
)
STEP_METRICS = ("train/loss", "train/grad_norm", "train/learning_rate", "train/tokens_seen")


def faults_in_training(steps: Iterator[int]) -> list[dict[str, Any]]:
    """Every process at every point of training, each at a step of its own that is saved."""
    return [
        {"point": point, "rank": 0, "step": next(steps), "action": "kill", "target": target}
        for point in TRAIN_POINTS
        for target in TARGETS
    ]


def test_every_process_killed_at_every_point_of_training(new_lab: Callable[[str], Lab]) -> None:
    faults = faults_in_training(itertools.count(SAVE_EVERY, SAVE_EVERY))
    steps = faults[-1]["step"] + SAVE_EVERY
    broken, clean = new_lab("broken"), new_lab("clean")
    for lab in (broken, clean):
        lab.config["training"]["steps"] = steps
        lab.config["checkpoint"]["save_every"] = SAVE_EVERY
        lab.config["evaluation"]["every"] = steps

    broken.plan(*faults, SLOW_STEPS)
    result, commands = broken.run_until_done(most=len(TRAIN_POINTS) + 1)

    assert broken.fired() == len(faults)
    assert commands == len(TRAIN_POINTS) + 1
    assert result["step"] == steps
    assert result["attempts"] == len(faults) + 1
    broken.assert_no_orphans()
    assert_parent_tells_the_truth(broken, result, steps)
    expected = clean.run_to_the_end()
    assert weights(broken, result) == weights(clean, expected)
    assert result["evaluation"] == expected["evaluation"]


def test_the_command_killed_at_every_point_after_training(new_lab: Callable[[str], Lab]) -> None:
    lab, clean = new_lab("broken"), new_lab("clean")
    lab.plan(*({"point": point, "action": "kill", "target": "flow"} for point in LATER_POINTS))
    result, commands = lab.run_until_done(most=len(LATER_POINTS) + 1)

    assert lab.fired() == len(LATER_POINTS)
    assert commands == len(LATER_POINTS) + 1
    assert result["attempts"] == 1
    lab.assert_no_orphans()
    assert_parent_tells_the_truth(lab, result, STEPS)
    assert result["champion"]
    expected = clean.run_to_the_end()
    assert weights(lab, result) == weights(clean, expected)
    assert result["evaluation"] == expected["evaluation"]


@pytest.mark.parametrize("point", ["export.begun", "export.files_written", "evaluate.begun"])
def test_a_stage_process_killed_is_tried_again_by_the_command(lab: Lab, point: str) -> None:
    lab.plan({"point": point, "action": "kill", "target": "self"})
    result = lab.run_to_the_end()
    assert lab.fired() == 1
    assert result["new_version"]
    assert len(versions(lab)) == 1


def client(lab: Lab) -> MlflowClient:
    return MlflowClient(tracking_uri=f"sqlite:///{lab.home / 'mlflow.db'}")


def versions(lab: Lab) -> list[Any]:
    return list(client(lab).search_model_versions("name='chaos'"))


def weights(lab: Lab, result: dict[str, Any]) -> dict[str, Any]:
    return final_tensors(lab.storage, result["run_id"])


def assert_parent_tells_the_truth(lab: Lab, result: dict[str, Any], steps: int) -> None:
    """One value of each metric for every step, one version with the alias, every status final."""
    mlflow = client(lab)
    run = mlflow.get_run(result["run_id"])
    assert run.info.status == "FINISHED"
    for metric in STEP_METRICS:
        history = mlflow.get_metric_history(result["run_id"], metric)
        assert [point.step for point in sorted(history, key=lambda p: p.step)] == list(range(1, steps + 1)), metric
    attempts = mlflow.search_runs([run.info.experiment_id], f"tags.`mlflow.parentRunId` = '{result['run_id']}'")
    assert len(attempts) == result["attempts"]
    assert "RUNNING" not in {attempt.info.status for attempt in attempts}
    assert [attempt.info.status for attempt in attempts].count("FINISHED") == 1
    assert [str(version.version) for version in versions(lab)] == [result["version"]]
    assert str(mlflow.get_model_version_by_alias("chaos", "champion").version) == str(result["version"])
    models = mlflow.search_logged_models([run.info.experiment_id])
    assert len([model for model in models if model.status == "READY"]) == 1
