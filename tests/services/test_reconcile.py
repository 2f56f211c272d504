"""Processes that die in earnest, and a reconciler that continues them: within a minute, once, never two at a time."""

import json
import time
from uuid import UUID

import pytest
from prefect.states import Cancelling, Crashed

from flows.presence import presence_key
from flows.reconcile import successor_key
from headrace.storage import Storage
from tests.chaos.harness import Lab
from tests.services.prefect_stack import SLOW_STEPS, Stack, attempts, committed, done, finish, run_folder, until
from tests.services.test_trigger import mlflow_status

STEPS = 12
WITHIN_SECONDS = 60.0


def started(stack: Stack, lab: Lab, name: str, *faults: dict) -> tuple[str, str]:
    """A run in the middle of its training: its deployment and its flow run."""
    lab.plan(*(faults or [SLOW_STEPS]))
    deployment = stack.deploy(lab, name)
    asked = stack.trigger(lab, deployment)
    until(lambda: committed(lab, 4), "step 4 is committed")
    return deployment, asked["flow_run_id"]


def test_a_killed_flow_run_goes_on_within_a_minute_and_is_watched_to_the_end(stack: Stack, local_lab: Lab) -> None:
    lab = local_lab
    lab.plan(SLOW_STEPS)
    deployment = stack.deploy(lab, "killed")
    reconciler = stack.deploy_reconciler(lab, "every-30-s", 30)
    try:
        config = str(lab.write_config())
        command = stack.start(lab, "trigger", "--config", config, "--deployment", deployment, "--wait", "--json")
        until(lambda: committed(lab, 4), "step 4 is committed")
        died = time.monotonic()
        stack.kill_flow_run(str(stack.flow_runs(deployment)[0].id))
        until(lambda: len(stack.flow_runs(deployment)) == 2, "another flow run continues it", WITHIN_SECONDS)
        continued_after = time.monotonic() - died
        ended = finish(command)
    finally:
        stack.delete_deployment(reconciler)

    assert continued_after < WITHIN_SECONDS
    assert ended.returncode == 0, ended.stderr
    first, second = stack.flow_runs(deployment)
    document = json.loads(ended.stdout)
    assert document["flow_run_id"] == str(second.id)
    assert document["state"] == "Completed"
    assert (first.state_name, second.name) == ("Crashed", f"{first.name}.2")
    assert first.parameters == second.parameters
    assert attempts(lab) == 2
    assert mlflow_status(lab) == "FINISHED"
    print(f"continued {continued_after:.1f} s after the death")


def test_worker_and_flow_gone_two_reconcilers_make_one(stack: Stack, local_lab: Lab) -> None:
    deployment, flow_run = started(stack, local_lab, "alone")
    stack.kill_worker()
    try:
        stack.kill_flow_run(flow_run)
        assert stack.state(flow_run) == "Running", "nobody has told the server"
        two = [stack.start_reconciler(local_lab) for _ in range(2)]
        said = [done(each) for each in two]
    finally:
        stack.start_worker()

    assert any("from step" in line for line in said[0] + said[1])
    first, second = stack.flow_runs(deployment)
    assert stack.state(flow_run) == "Crashed"
    assert second.idempotency_key == successor_key(str(first.id))
    assert stack.ended(str(second.id)).state_name == "Completed"
    assert attempts(local_lab) == 2
    assert stack.reconcile(local_lab) == []
    assert len(stack.flow_runs(deployment)) == 2


@pytest.mark.slow
def test_one_that_is_called_crashed_and_lives_is_left_alone(stack: Stack, local_lab: Lab) -> None:
    deployment, flow_run = started(stack, local_lab, "alive")
    mark(stack, flow_run)
    assert stack.reconcile(local_lab) == []
    assert len(stack.flow_runs(deployment)) == 1
    until(lambda: stack.state(flow_run) == "Completed", "it ends by itself")
    assert attempts(local_lab) == 1


@pytest.mark.slow
def test_a_wrong_guess_never_lets_two_work(stack: Stack, local_lab: Lab) -> None:
    deployment, flow_run = started(stack, local_lab, "guess")
    mark(stack, flow_run)
    # As if its process could not be seen: another machine, a store that forgot.
    Storage.open(str(local_lab.store)).delete(presence_key(flow_run))
    (said,) = stack.reconcile(local_lab)
    assert "continues it from step" in said
    second = stack.flow_runs(deployment)[1]

    assert stack.ended(str(second.id)).state_name == "Completed"
    assert attempts(local_lab) == 1, "the second one waited for the first one, and found everything done"
    assert stack.state(flow_run) == "Completed"
    assert mlflow_status(local_lab) == "FINISHED"


@pytest.mark.slow
def test_cancelling_without_a_process_becomes_cancelled_and_stays(stack: Stack, local_lab: Lab) -> None:
    deployment, flow_run = started(stack, local_lab, "final")
    stack.kill_worker()
    try:
        stack.kill_flow_run(flow_run)
        with stack.client() as client:
            client.set_flow_run_state(UUID(flow_run), Cancelling())
        assert stack.state(flow_run) == "Cancelling"
        (said,) = stack.reconcile(local_lab)
    finally:
        stack.start_worker()
    assert "Cancelled. It was asked to cancel" in said
    assert stack.state(flow_run) == "Cancelled"
    assert stack.reconcile(local_lab) == []
    assert len(stack.flow_runs(deployment)) == 1
    assert mlflow_status(local_lab) == "KILLED"


@pytest.mark.slow
def test_without_progress_the_budget_ends_it(stack: Stack, local_lab: Lab) -> None:
    local_lab.plan({"point": "unit.before_commit", "action": "kill", "target": "flow", "always": True})
    deployment = stack.deploy(local_lab, "budget")
    first = stack.trigger(local_lab, deployment)["flow_run_id"]
    until(lambda: stack.state(first) == "Crashed", "the first one dies")
    assert len(stack.reconcile(local_lab, budget=1)) == 1
    second = str(stack.flow_runs(deployment)[1].id)
    until(lambda: stack.state(second) == "Crashed", "the second one dies")
    (said,) = stack.reconcile(local_lab, budget=1)

    assert "1 resubmissions in a row brought the run no further than step 0" in said
    failed = stack.flow_run(second)
    assert failed.state_name == "Failed"
    assert "trigger the same config again" in str(failed.state.message if failed.state else "")
    assert stack.reconcile(local_lab, budget=1) == []
    assert len(stack.flow_runs(deployment)) == 2
    assert not (run_folder(local_lab).exists() if (local_lab.store / "run-keys").exists() else False)


def mark(stack: Stack, flow_run: str) -> None:
    """What a rule on missing heartbeats does."""
    with stack.client() as client:
        client.set_flow_run_state(UUID(flow_run), Crashed(message="Not heard of."))


pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning")
