"""What MLflow shows follows the store."""

import json

import pytest

from headrace.lease import hold
from tasks.runs import lease_key, resolve_run
from tasks.shown import (
    ATTEMPT_TAG,
    announce,
    bring_up_to_date,
    covered_events,
    evaluation_in_training,
    live_page,
    reap,
    untrained_bits_per_byte,
)
from tasks.train import TrainingSession, train
from tests.mlflow_database import NOLOAD
from tests.tasks.stand_ins import DATASET, DeadMirror, commit_checkpoint, make_request
from training.launch.resume import next_attempt

pytestmark = pytest.mark.filterwarnings(NOLOAD)


@pytest.fixture
def run(space):
    return resolve_run(space, make_request(), DATASET)


def test_the_parent_shows_the_identity_once_and_the_dataset(space, run):
    for _ in range(2):
        announce(space, run, make_request(), DATASET)
    assert space.tracker.params(run.run_id) == {
        "name": "tiny",
        "optimizer.learning_rate": "0.003",
        "training.steps": "12",
    }
    inputs = space.tracker.client.get_run(run.run_id).inputs.dataset_inputs
    assert [(i.dataset.name, i.dataset.digest) for i in inputs] == [(DATASET.key, DATASET.digest[:36])]
    source = json.loads(inputs[0].dataset.source)["uri"]
    assert source == space.storage.url(f"datasets/{DATASET.key}/manifest.json")


def test_the_parent_says_what_it_is_and_keeps_what_people_wrote(space, run):
    announce(space, run, make_request(), DATASET)
    told = space.tracker.get_run(run.run_id).tags["mlflow.note.content"]
    assert "trained from initial weights: 12 steps of" in told
    assert f"dataset `{DATASET.key}`" in told
    assert f"`{run.spec.run_key}`" in told
    assert f"training.init_from=run:{run.run_id}@STEP" in told
    assert space.storage.url(run.spec.run_prefix) in told
    space.tracker.set_tags(run.run_id, {"mlflow.note.content": "The one for the paper."})
    announce(space, run, make_request(), DATASET)
    assert space.tracker.get_run(run.run_id).tags["mlflow.note.content"] == "The one for the paper."


def test_bringing_up_to_date_twice_changes_nothing(space, run, ranks):
    ranks.ends = [6]
    with pytest.raises(Exception, match="killed"):
        train.fn(space, run, TrainingSession())
    before = _everything(space, run)
    for _ in range(2):
        bring_up_to_date(space, run)
    assert _everything(space, run) == before


def _everything(space, run):
    children = space.tracker.children(run.experiment_id, run.run_id)
    ids = [run.run_id, *(child.run_id for child in children)]
    return {i: (space.tracker.get_run(i).status, space.tracker.history(i, "train/loss")) for i in ids}


def test_the_running_attempt_is_left_alone(space, run, ranks):
    attempt = next_attempt(space.storage, run.spec, work_root=space.work_dir)
    assert attempt is not None
    bring_up_to_date(space, run, running=attempt.attempt)
    assert space.tracker.children(run.experiment_id, run.run_id) == []
    bring_up_to_date(space, run)
    child = space.tracker.children(run.experiment_id, run.run_id)[0]
    assert (child.status, child.tags[ATTEMPT_TAG]) == ("KILLED", "1")
    assert child.tags["headrace.restored_from"] == "initial weights"
    assert child.tags["headrace.layout.world_size"] == "2"


def test_only_what_a_commit_of_the_chain_covers_counts(space, run, ranks):
    ranks.ends = [6, 10]
    for _ in range(2):
        with pytest.raises(Exception, match="killed"):
            train.fn(space, run, TrainingSession())
    covered = [(e["attempt"], e["step"]) for e in covered_events(space.storage, run.spec.run_prefix)]
    assert covered == [(1, 0), *((1, n) for n in range(1, 5)), *((2, n) for n in range(5, 9))]


def test_a_commit_beside_the_chain_covers_nothing(space, run, ranks):
    """Attempt 1 wakes up after attempt 2 was claimed, and commits one more step."""
    ranks.ends = [6]
    with pytest.raises(Exception, match="killed"):
        train.fn(space, run, TrainingSession())
    next_attempt(space.storage, run.spec, work_root=space.work_dir)
    commit_checkpoint(space.storage, ranks.specs[0], 6)
    covered = [(e["attempt"], e["step"]) for e in covered_events(space.storage, run.spec.run_prefix)]
    assert covered == [(1, n) for n in range(5)]


def test_nothing_is_covered_before_the_first_commit(space, run):
    assert list(covered_events(space.storage, run.spec.run_prefix)) == []
    assert untrained_bits_per_byte(space.storage, run.spec.run_prefix) is None


def test_the_untrained_model_was_measured_before_the_first_step(space, run, ranks):
    train.fn(space, run, TrainingSession())
    assert untrained_bits_per_byte(space.storage, run.spec.run_prefix) == 4.5


def test_an_evaluation_in_training_is_found_by_its_step(space, run, ranks):
    train.fn(space, run, TrainingSession())
    seen = evaluation_in_training(space.storage, run.spec.run_prefix, 0)
    assert seen is not None
    assert seen["loss"] == 6.0
    assert evaluation_in_training(space.storage, run.spec.run_prefix, 3) is None


def test_a_database_has_no_page(space, run):
    assert live_page(space, run) is None


# ----------------------------------------------------------------------------------------------------------- reaper


def test_a_run_that_no_command_works_on_is_not_running(space, run):
    reap(space, "here")
    assert space.tracker.get_run(run.run_id).status == "KILLED"


def test_a_run_that_a_command_works_on_is_left_alone(space, run):
    with hold(space.storage, lease_key(run.run_id)):
        reap(space, "here")
    assert space.tracker.get_run(run.run_id).status == "RUNNING"


def test_the_attempts_of_a_reaped_run_are_completed_first(space, run, ranks, monkeypatch):
    monkeypatch.setattr("tasks.train.EventMirror", DeadMirror)
    ranks.ends = [6]
    with pytest.raises(Exception, match="killed"):
        train.fn(space, run, TrainingSession())
    reap(space, "here")
    children = space.tracker.children(run.experiment_id, run.run_id)
    assert [child.status for child in children] == ["KILLED"]
    assert len(space.tracker.history(children[0].run_id, "train/loss")) == 6
    assert len(space.tracker.history(run.run_id, "train/loss")) == 4


def test_runs_of_others_in_the_experiment_are_left_alone(space, run):
    other = space.tracker.create_run(run.experiment_id, "made by hand", tags={})
    reap(space, "here")
    assert space.tracker.get_run(other.run_id).status == "RUNNING"
    reap(space, "an experiment that does not exist")


def test_a_run_that_ends_while_it_is_looked_at_keeps_its_end(space, run, monkeypatch):
    """The list of running runs is old by the time that one of them is held."""
    listed = space.tracker.find_runs(run.experiment_id, {}, status="RUNNING")
    assert [record.run_id for record in listed] == [run.run_id]
    space.tracker.set_status(run.run_id, "FINISHED")
    monkeypatch.setattr(type(space.tracker), "find_runs", lambda *_, **__: listed)
    reap(space, "here")
    assert space.tracker.get_run(run.run_id).status == "FINISHED"
