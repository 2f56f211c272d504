"""A batch that spoils the loss each time it is met: the run goes back, passes over it, and survives kills meanwhile."""

from collections.abc import Callable

import pytest
from mlflow import MlflowClient

from headrace.events import read_events
from tests.chaos.conftest import STEPS
from tests.chaos.harness import Lab, final_tensors
from tests.mlflow_database import NOLOAD

pytestmark = [pytest.mark.chaos, pytest.mark.filterwarnings(NOLOAD)]

BATCH = 8
POISON = {"point": "step.loss", "position": 7 * BATCH, "rank": 1, "action": "scale", "factor": "nan", "always": True}
SLOW_STEPS = {"point": "step.middle", "action": "sleep", "seconds": 0.25, "always": True}


def test_a_run_goes_back_and_is_the_same_when_it_is_killed_on_the_way(new_lab: Callable[[str], Lab]) -> None:
    calm, killed = new_lab("calm"), new_lab("killed")
    for lab in (calm, killed):
        lab.config["stability"] = {"on_nonfinite": "rewind", "rewind_batches": 3}
        lab.config["checkpoint"]["save_every"] = 3

    calm.plan(POISON, SLOW_STEPS)
    expected = calm.run_to_the_end()
    # Attempt 1 meets the batch as its step 8, after the commit of step 6; attempt 2 starts from 3, as 6 is too late.
    assert expected["attempts"] == 2
    prefix = f"runs/{expected['run_id']}/artifacts"
    assert calm.storage.read_json(f"{prefix}/attempts/0002.json")["restore"] == {"attempt": 1, "step": 3}
    assert calm.storage.read_json(f"{prefix}/attempts/0002.json")["skip"] == [{"start": 40, "stop": 64}]
    steps = [e["step"] for e in read_events(calm.storage, prefix, 2) if e["kind"] == "step"]
    assert steps == list(range(4, STEPS + 1))

    kill = {"point": "step.middle", "rank": 0, "action": "kill"}
    killed.plan(POISON, SLOW_STEPS, kill | {"step": 5, "target": "rank:1"}, kill | {"step": 10, "target": "flow"})
    result, commands = killed.run_until_done(most=3)
    assert (commands, result["attempts"]) == (2, 4)
    killed.assert_no_orphans()
    assert final_tensors(killed.storage, result["run_id"]) == final_tensors(calm.storage, expected["run_id"])

    for lab, document in ((calm, expected), (killed, result)):
        mlflow = MlflowClient(tracking_uri=f"sqlite:///{lab.home / 'mlflow.db'}")
        history = mlflow.get_metric_history(document["run_id"], "train/loss")
        # The newest value of each step is that of the chain; before it stands what the rewind replaced.
        newest = {point.step: point.value for point in sorted(history, key=lambda point: point.timestamp)}
        last = 2 if lab is calm else 4
        told = {}
        for attempt in range(1, last + 1):
            for event in read_events(lab.storage, f"runs/{document['run_id']}/artifacts", attempt):
                if event["kind"] == "step":
                    told[event["step"]] = event["loss"]
        assert newest == told
        assert sorted(newest) == list(range(1, STEPS + 1))
