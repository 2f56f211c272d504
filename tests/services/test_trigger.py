"""`headrace trigger` against a real server and worker: once for each key, to the end, and cancelled in every stage."""

import json
import re
import signal
import time
from typing import Any

import pytest
from mlflow import MlflowClient
from prefect.utilities.callables import parameter_schema

from flows.pretrain_flow import pretrain
from tests.chaos.harness import Lab
from tests.mlflow_database import NOLOAD
from tests.services.prefect_stack import SLOW_STEPS, Stack, attempts, committed, finish, run_folder, until

pytestmark = pytest.mark.filterwarnings(NOLOAD)

STEPS = 12


def mlflow_status(lab: Lab) -> str:
    client = MlflowClient(f"sqlite:///{lab.home}/mlflow.db")
    return str(client.get_run(run_folder(lab).parent.name).info.status)


def test_one_run_for_each_key_and_its_summary(stack: Stack, local_lab: Lab) -> None:
    lab, deployment = local_lab, stack.deploy(local_lab, "once")
    config = str(lab.write_config())
    asked = ["trigger", "--config", config, "--deployment", deployment, "--idempotency-key", "release-1"]

    first = json.loads(stack.headrace(lab, *asked, "--json").stdout)
    watched = stack.headrace(lab, *asked, "--wait", "--json")
    assert watched.returncode == 0, watched.stderr
    document = json.loads(watched.stdout)

    assert first["created"] is True
    assert document["created"] is False
    assert "'release-1' has the flow run" in watched.stderr
    assert document["flow_run_id"] == first["flow_run_id"]
    assert document["state"] == "Completed"
    assert [(s["name"], s["outcome"]) for s in document["stages"]] == [
        ("prepare", "done"),
        ("train", "done"),
        ("export", "done"),
        ("evaluate", "done"),
        ("register", "done"),
    ]
    assert f"step {STEPS}" in document["summary"]
    assert document["pages"]["Prefect"].endswith(f"/runs/flow-run/{first['flow_run_id']}")
    # Which of them is seen is a matter of timing: a stage of this run can be shorter than the watcher's interval.
    assert re.search(r"stage=(prepare|train|export|evaluate|register)\b", watched.stderr)

    refused = stack.headrace(lab, *asked, "--set", "training.steps=13")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "training.steps is 12 there, 13 here" in refused.stderr
    assert len(stack.flow_runs(deployment)) == 1


def test_what_is_refused_makes_no_run(stack: Stack, local_lab: Lab) -> None:
    schema = parameter_schema(pretrain).model_dump(exclude_unset=True)
    # a deployment of an older version, which does not know the section
    del schema["definitions"]["PipelineConfig"]["properties"]["tracking"]
    deployment = stack.deploy(local_lab, "older", schema=schema)
    config = str(local_lab.write_config())

    older = stack.headrace(local_lab, "trigger", "--config", config, "--deployment", deployment)
    unknown = stack.headrace(local_lab, "trigger", "--config", config, "--deployment", "pretrain/nobody", "--json")

    assert older.returncode == 2
    assert "'tracking' was unexpected" in older.stderr
    assert stack.flow_runs(deployment) == []
    assert unknown.returncode == 2
    assert deployment in json.loads(unknown.stdout)["error"]["message"]


def test_the_server_killed_across_the_end_of_the_training_costs_nothing(stack: Stack, local_lab: Lab) -> None:
    local_lab.plan(SLOW_STEPS)
    deployment = stack.deploy(local_lab, "outage")
    config = str(local_lab.write_config())
    command = stack.start(local_lab, "trigger", "--config", config, "--deployment", deployment, "--wait", "--json")
    until(lambda: committed(local_lab, 8), "step 8 is committed")

    stack.kill_server()
    until(lambda: committed(local_lab, STEPS), "the training goes on without a server")
    time.sleep(20)  # the outage that is tested
    stack.start_server()
    ended = finish(command)

    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["state"] == "Completed"
    assert "does not answer; asking again" in ended.stderr
    assert attempts(local_lab) == 1
    assert mlflow_status(local_lab) == "FINISHED"


def test_a_signal_to_the_waiting_command_cancels_and_the_work_is_kept(stack: Stack, local_lab: Lab) -> None:
    local_lab.plan(SLOW_STEPS)
    deployment = stack.deploy(local_lab, "signal")
    config = str(local_lab.write_config())
    command = stack.start(local_lab, "trigger", "--config", config, "--deployment", deployment, "--wait")
    until(lambda: committed(local_lab, 4), "step 4 is committed")

    command.send_signal(signal.SIGTERM)
    ended = finish(command)

    assert ended.returncode == 3
    assert "is Cancelled" in ended.stderr
    local_lab.assert_no_orphans()
    (flow_run,) = stack.flow_runs(deployment)
    assert flow_run.state_name == "Cancelled"
    assert mlflow_status(local_lab) == "KILLED"
    assert stack.reconcile(local_lab) == []
    assert len(stack.flow_runs(deployment)) == 1

    local_lab.plan()
    again = stack.headrace(
        local_lab, "trigger", "--config", config, "--deployment", stack.deploy(local_lab, "signal"), "--wait", "--json"
    )
    assert again.returncode == 0, again.stderr
    record = json.loads(sorted((run_folder(local_lab) / "attempts").glob("*.json"))[-1].read_text(encoding="utf-8"))
    assert record["restore"]["step"] >= 4, "the checkpoint of the cancelled run is used"


STAGES = {
    "prepare": {"point": "unit.before_commit", "action": "sleep", "seconds": 300},
    "train": {"point": "step.middle", "step": 6, "rank": 0, "action": "sleep", "seconds": 300},
    "export": {"point": "export.begun", "action": "sleep", "seconds": 300},
    "evaluate": {"point": "evaluate.begun", "action": "sleep", "seconds": 300},
    "register": {"point": "version.before", "action": "sleep", "seconds": 300},
}


@pytest.mark.parametrize(
    "stage", [stage if stage == "train" else pytest.param(stage, marks=pytest.mark.slow) for stage in STAGES]
)
def test_cancel_in_every_stage_frees_everything_within_half_a_minute(stack: Stack, local_lab: Lab, stage: str) -> None:
    local_lab.plan(STAGES[stage])
    deployment = stack.deploy(local_lab, f"cancel-{stage}")
    asked = stack.trigger(local_lab, deployment)
    until(lambda: local_lab.fired() == 1, f"the run is in {stage}")

    cancel(stack, asked)
    until(lambda: not local_lab.processes(), "every process has ended", 30.0)
    flow_run = stack.ended(asked["flow_run_id"])

    assert flow_run.state_name == "Cancelled"
    assert stack.reconcile(local_lab) == []
    assert len(stack.flow_runs(deployment)) == 1
    if stage != "prepare":
        assert mlflow_status(local_lab) == "KILLED"
        assert committed(local_lab, 4 if stage == "train" else STEPS)
    if stage not in ("prepare", "train"):
        return  # from here on it is the same: what is committed is found, as after a kill

    local_lab.plan()
    again = stack.trigger(local_lab, stack.deploy(local_lab, f"cancel-{stage}"))
    assert stack.ended(again["flow_run_id"]).state_name == "Completed"
    assert mlflow_status(local_lab) == "FINISHED"


def cancel(stack: Stack, asked: dict[str, Any]) -> None:
    """As the button of Prefect's page does."""
    from uuid import UUID

    from prefect.states import Cancelling

    with stack.client() as client:
        client.set_flow_run_state(UUID(asked["flow_run_id"]), Cancelling())


@pytest.mark.slow
def test_a_pool_that_nobody_polls_is_said(stack: Stack, local_lab: Lab) -> None:
    deployment = stack.deploy(local_lab, "nobody")
    stack.kill_worker()
    try:
        config = str(local_lab.write_config())
        waiting = stack.start(
            local_lab, "trigger", "--config", config, "--deployment", deployment, "--wait", "--timeout", "60"
        )
        ended = finish(waiting)
    finally:
        stack.start_worker()
    assert ended.returncode == 1
    assert "(--timeout). It goes on" in ended.stderr
    assert "no worker polls the work pool 'tests'" in ended.stderr
    assert stack.ended(str(stack.flow_runs(deployment)[0].id)).state_name == "Completed"
