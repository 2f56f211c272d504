"""The same identity is the same run; another one is another, and says why."""

import threading

import pytest

from headrace.errors import ConfigError, DamagedData, NotFound
from headrace.lease import hold
from tasks.runs import RUN_KEY_TAG, DatasetRef, flatten, is_held, lease_key, read_run, resolve_run
from tests.mlflow_database import NOLOAD
from tests.tasks.stand_ins import DATASET, make_request
from training.checkpoint.config import CheckpointConfig
from training.launch.config import LaunchConfig

pytestmark = pytest.mark.filterwarnings(NOLOAD)


def test_a_run_is_made_once(space):
    first = resolve_run(space, make_request(), DATASET)
    second = resolve_run(space, make_request(), DATASET)
    assert (first.is_new, second.is_new) == (True, False)
    assert second.run_id == first.run_id
    assert first.related is None
    assert second.related is None
    assert space.storage.list("run-keys") == [f"run-keys/{first.spec.run_key}.json"]
    record = space.tracker.get_run(first.run_id)
    assert record.artifact_root == str(space.storage.local_path(first.spec.run_prefix))
    assert record.tags["headrace.dataset_digest"] == DATASET.digest


def test_its_document_is_written_once_and_read_back(space):
    run = resolve_run(space, make_request(), DATASET)
    assert read_run(space.storage, run.run_id) == run.spec
    assert (run.spec.dataset_key, run.spec.tokenizer_digest) == (DATASET.key, DATASET.tokenizer_digest)


def test_execution_fields_are_those_of_this_command_and_the_document_keeps_the_first(space):
    resolve_run(space, make_request(), DATASET)
    changed = make_request(launch=LaunchConfig(ranks_per_node=4), checkpoint=CheckpointConfig(save_every=7))
    run = resolve_run(space, changed, DATASET)
    assert not run.is_new
    assert (run.spec.launch.ranks_per_node, run.spec.checkpoint.save_every) == (4, 7)
    assert read_run(space.storage, run.run_id).launch.ranks_per_node == 2


def test_another_identity_is_another_run_and_says_what_changed(space):
    first = resolve_run(space, make_request(), DATASET)
    from tasks.shown import announce

    announce(space, first, make_request(), DATASET)
    identity = {"name": "tiny", "optimizer": {"learning_rate": 0.01}, "training": {"steps": 12}}
    second = resolve_run(space, make_request(identity=identity), DATASET)
    assert second.is_new
    assert second.run_id != first.run_id
    assert second.related is not None
    assert "optimizer.learning_rate was '0.003', now '0.01'" in second.related
    assert f"training.init_from to run:{first.run_id}@STEP" in second.related


def test_another_dataset_is_another_run(space):
    first = resolve_run(space, make_request(), DATASET)
    second = resolve_run(space, make_request(), DatasetRef("tiny-1", "f" * 64, DATASET.tokenizer_digest))
    assert second.run_id != first.run_id
    assert second.related is not None


def test_a_run_that_was_made_and_not_named_is_taken_over(space):
    request = make_request()
    experiment = space.tracker.ensure_experiment("here", str(space.storage.local_path("runs")))
    orphan = space.tracker.create_run(experiment, "tiny", tags={RUN_KEY_TAG: request.run_key(DATASET)})
    run = resolve_run(space, request, DATASET)
    assert run.run_id == orphan.run_id


def test_of_two_commands_at_once_both_get_the_run_that_is_named(space, monkeypatch):
    """The other command names its run between our search and our own naming."""
    request = make_request()
    experiment = space.tracker.ensure_experiment("here", str(space.storage.local_path("runs")))
    create = space.storage.create
    other = []

    def create_after_the_other(key, data):
        if key.startswith("run-keys/") and not other:
            other.append(space.tracker.create_run(experiment, "tiny", tags={}))
            create(key, f'{{"run_id": "{other[0].run_id}"}}'.encode())
        return create(key, data)

    monkeypatch.setattr(space.storage, "create", create_after_the_other)
    run = resolve_run(space, request, DATASET)
    assert run.run_id == other[0].run_id
    assert space.tracker.find_runs(experiment, {RUN_KEY_TAG: request.run_key(DATASET)}) == [], "ours is in the bin"


def test_threads_that_start_together_agree(space):
    found = []

    def work() -> None:
        found.append(resolve_run(space, make_request(), DATASET).run_id)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert len(set(found)) == 1


def test_an_experiment_of_another_store_is_refused(space):
    space.tracker.ensure_experiment("here", "s3://elsewhere/runs")
    with pytest.raises(ConfigError, match="s3://elsewhere/runs"):
        resolve_run(space, make_request(), DATASET)
    assert space.storage.list("run-keys") == []


def test_the_experiment_of_a_run_stays_and_says_so(space):
    first = resolve_run(space, make_request(), DATASET)
    second = resolve_run(space, make_request(experiment="there"), DATASET)
    assert second.run_id == first.run_id
    assert second.related == (
        "The run was made in the experiment 'here' and stays there; tracking.experiment 'there' is for new runs."
    )


def test_a_run_that_mlflow_lost_is_refused_with_the_way_out(space):
    request = make_request()
    run = resolve_run(space, request, DATASET)
    space.storage.write_json(f"run-keys/{run.spec.run_key}.json", {"run_id": "0" * 32})
    with pytest.raises(ConfigError, match="MLFLOW_TRACKING_URI"):
        resolve_run(space, request, DATASET)


def test_a_deleted_run_is_refused_with_the_way_back(space):
    run = resolve_run(space, make_request(), DATASET)
    space.tracker.delete_run(run.run_id)
    with pytest.raises(ConfigError, match=f"mlflow runs restore --run-id {run.run_id}"):
        resolve_run(space, make_request(), DATASET)


def test_a_document_of_another_run_is_noticed(space):
    run = resolve_run(space, make_request(), DATASET)
    document = space.storage.read_json(f"{run.spec.run_prefix}/run.json")
    space.storage.write_json(f"{run.spec.run_prefix}/run.json", {**document, "run_key": "f" * 64})
    with pytest.raises(DamagedData, match="another run"):
        resolve_run(space, make_request(), DATASET)
    space.storage.write_json(f"{run.spec.run_prefix}/run.json", {"format_version": 1})
    with pytest.raises(DamagedData, match="not the document of a run"):
        resolve_run(space, make_request(), DATASET)
    with pytest.raises(NotFound):
        read_run(space.storage, "0" * 32)


def test_a_run_is_held_while_a_command_works_on_it(space):
    assert not is_held(space.storage, "a" * 32)
    with hold(space.storage, lease_key("a" * 32)):
        assert is_held(space.storage, "a" * 32)
    assert not is_held(space.storage, "a" * 32)
    space.storage.write_json(lease_key("b" * 32), {"written": "by a newer version"})
    assert is_held(space.storage, "b" * 32)


def test_documents_are_flattened_to_what_mlflow_shows():
    flat = flatten({"a": {"b": 1, "c": {"d": None}}, "e": ["x", 2], "f": "text", "g": True})
    assert flat == {"a.b": "1", "a.c.d": "None", "e": '["x", 2]', "f": "text", "g": "True"}
