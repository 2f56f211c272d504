"""Flow runs that nobody would ever touch again, on a real server: each goes on; what only waits is left alone."""

import datetime
import time
from uuid import UUID

import pytest
from prefect.states import AwaitingRetry, Pending

from flows.presence import presence_key
from flows.reconcile import PENDING_SECONDS
from headrace.storage import Storage
from tasks.runs import lease_key
from tests.chaos.harness import Lab
from tests.services.prefect_stack import SLOW_STEPS, Stack, attempts, committed, run_folder, until
from tests.services.test_reconcile import started
from tests.services.test_trigger import mlflow_status

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning"),
]

WITHIN_SECONDS = 60.0
OUTAGE_SECONDS = 120.0


def test_pending_without_a_process_goes_on_after_its_time(stack: Stack, local_lab: Lab) -> None:
    """As when a worker dies between taking a run and starting it."""
    deployment = stack.deploy(local_lab, "pending")
    stack.kill_worker()
    try:
        flow_run = stack.trigger(local_lab, deployment)["flow_run_id"]
        with stack.client() as client:
            client.set_flow_run_state(UUID(flow_run), Pending())
        assert stack.reconcile(local_lab) == [], "a worker may just be starting it"
        said = until(lambda: stack.reconcile(local_lab), "its time is over", PENDING_SECONDS + WITHIN_SECONDS)
    finally:
        stack.start_worker()
    assert "never came to work or has ended" in said[0]
    assert stack.state(flow_run) == "Crashed"
    _, second = stack.flow_runs(deployment)
    assert stack.ended(str(second.id)).state_name == "Completed"
    assert attempts(local_lab) == 1


def test_a_retry_that_nobody_starts_goes_on(stack: Stack, local_lab: Lab) -> None:
    deployment, flow_run = started(stack, local_lab, "awaiting")
    stack.kill_worker()
    try:
        stack.kill_flow_run(flow_run)
        long_ago = datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=300)
        with stack.client() as client:
            client.set_flow_run_state(UUID(flow_run), AwaitingRetry(scheduled_time=long_ago), force=True)
        assert stack.state(flow_run) == "AwaitingRetry"
        (said,) = stack.reconcile(local_lab)
    finally:
        stack.start_worker()
    assert "continues it from step" in said
    assert stack.state(flow_run) == "Crashed"
    _, second = stack.flow_runs(deployment)
    assert stack.ended(str(second.id)).state_name == "Completed"
    assert attempts(local_lab) == 2


def test_one_that_is_late_for_want_of_a_worker_keeps_its_place(stack: Stack, local_lab: Lab) -> None:
    deployment = stack.deploy(local_lab, "late")
    stack.kill_worker()
    try:
        flow_run = stack.trigger(local_lab, deployment)["flow_run_id"]
        until(lambda: stack.state(flow_run) == "Late", "the server calls it late")
        assert stack.reconcile(local_lab) == []
    finally:
        stack.start_worker()
    assert stack.ended(flow_run).state_name == "Completed"
    assert len(stack.flow_runs(deployment)) == 1


def test_a_machine_that_died_is_replaced_within_a_minute(stack: Stack, local_lab: Lab) -> None:
    """Its process ids say nothing here: only that it stops beating does."""
    deployment, flow_run = started(stack, local_lab, "elsewhere")
    storage = Storage.open(str(local_lab.store))
    stack.kill_worker()
    try:
        stack.kill_flow_run(flow_run)
        died = time.monotonic()
        for key in (presence_key(flow_run), lease_key(run_folder(local_lab).parent.name)):
            holder = {**storage.read_json(key), "machine": "another-boot", "host": "another-machine"}
            storage.write_json(key, holder)
        (said,) = stack.reconcile(local_lab, watch_seconds=20.0)
        _, second = until(lambda: stack.flow_runs(deployment), "it is continued")
        print(f"continued {time.monotonic() - died:.1f} s after the death of another machine")
    finally:
        stack.start_worker()
    assert "gives no sign of life" in said
    assert stack.ended(str(second.id)).state_name == "Completed"
    assert attempts(local_lab) == 2
    assert mlflow_status(local_lab) == "FINISHED"


def test_two_minutes_without_the_server_cost_nothing(stack: Stack, local_lab: Lab) -> None:
    local_lab.plan(SLOW_STEPS)
    deployment = stack.deploy(local_lab, "two-minutes")
    flow_run = stack.trigger(local_lab, deployment)["flow_run_id"]
    until(lambda: committed(local_lab, 4), "step 4 is committed")
    stack.kill_server()
    time.sleep(OUTAGE_SECONDS)  # the outage that is tested
    stack.start_server()
    assert stack.ended(flow_run).state_name == "Completed"
    assert len(stack.flow_runs(deployment)) == 1
    assert attempts(local_lab) == 1
    assert mlflow_status(local_lab) == "FINISHED"
    assert all(stage["outcome"] == "reused" for stage in local_lab.run_to_the_end()["stages"])
