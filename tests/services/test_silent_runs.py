"""The automation on silent runs, on a real server: it fires, and what it marks is continued as the same run."""

import contextlib
from collections.abc import Iterator

import pytest

from flows.deployments import automations
from tests.chaos.harness import Lab
from tests.services.prefect_stack import Stack, attempts, run_folder, until
from tests.services.test_reconcile import started
from tests.services.test_trigger import mlflow_status

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning"),
]

WITHIN_SECONDS = 75
"""Instead of the three minutes that are shipped; Prefect sends no more than a heartbeat every 30 seconds."""


@contextlib.contextmanager
def automation(stack: Stack) -> Iterator[str]:
    """The automation that is shipped, with a shorter time; gives what it writes into the state of a run."""
    (document,) = automations()
    document["trigger"]["within"] = WITHIN_SECONDS
    with stack.client() as client:
        made = client.request("POST", "/automations/", json=document).json()["id"]
        try:
            yield str(document["actions"][0]["message"])
        finally:
            client.request("DELETE", f"/automations/{made}")


def test_a_silent_run_is_marked_and_continued_as_the_same_run(stack: Stack, local_lab: Lab) -> None:
    with automation(stack) as message:
        deployment, flow_run = started(stack, local_lab, "silent")
        stack.kill_worker()  # or it would tell the server how its flow run ended
        try:
            stack.kill_flow_run(flow_run)
            assert stack.state(flow_run) == "Running", "nobody has told the server"
            until(lambda: stack.state(flow_run) == "Crashed", "the automation marks it", WITHIN_SECONDS + 90.0)
            state = stack.flow_run(flow_run).state
            assert state is not None
            assert state.message == message
            (said,) = stack.reconcile(local_lab)
            assert "It crashed." in said
        finally:
            stack.start_worker()

        first, second = stack.flow_runs(deployment)
        assert stack.ended(str(second.id)).state_name == "Completed"
        assert (str(first.id), first.parameters) == (flow_run, second.parameters)
    run_folder(local_lab)  # there is one run key
    assert attempts(local_lab) == 2
    assert mlflow_status(local_lab) == "FINISHED"


def test_one_that_lives_is_not_marked_however_long_it_takes(stack: Stack, local_lab: Lab) -> None:
    slow = {"point": "step.middle", "action": "sleep", "seconds": WITHIN_SECONDS / 6, "always": True}
    with automation(stack):
        local_lab.plan(slow)
        deployment = stack.deploy(local_lab, "lives")
        flow_run = stack.trigger(local_lab, deployment)["flow_run_id"]
        until(lambda: stack.state(flow_run) == "Completed", "it ends by itself", 8 * WITHIN_SECONDS)
        with stack.client() as client:
            passed = [str(state.name) for state in client.read_flow_run_states(stack.flow_run(flow_run).id)]
    assert "Crashed" not in passed
    assert attempts(local_lab) == 1
