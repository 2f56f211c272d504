"""An export is made once, in place as one logged model, and found again."""

import pytest

from headrace.errors import AttemptFailed, DamagedData, NotFound
from headrace.registry import Registry
from headrace.storage import Storage
from tasks.export import EXPORT_TAG, export
from tasks.exports import export_key, exports_of, key_below, pointer_key
from tasks.runs import resolve_run
from tasks.train import TrainingSession, train
from tests.mlflow_database import NOLOAD
from tests.tasks.stand_ins import DATASET, Killed, die, make_request

pytestmark = pytest.mark.filterwarnings(NOLOAD)


@pytest.fixture
def run(space):
    return resolve_run(space, make_request(), DATASET)


@pytest.fixture
def training(space, run, ranks):
    return train.fn(space, run, TrainingSession())


def models(space, run):
    found = space.tracker.client.search_logged_models([run.experiment_id])
    return [(model.model_id, str(model.status)) for model in found]


def test_the_export_lies_where_its_logged_model_is(space, run, training, stages):
    result = export.fn(space, run, training, "float32")
    assert not result.reused
    assert result.step == 12
    assert result.prefix == f"runs/models/{result.model.model_id}/artifacts"
    assert models(space, run) == [(result.model.model_id, "READY")]
    module, spec = stages.calls[0]
    assert module == "training.export.main"
    assert (spec["target"], spec["dtype"], spec["run_id"]) == (result.prefix, "float32", run.run_id)
    assert spec["checkpoint"] == {"attempt": 1, "step": 12}
    assert "loader_module: training.export.pyfunc" in spec["extra_files"]["MLmodel"]
    assert [folder for folder, _ in exports_of(space.storage, run.spec.run_prefix)] == [result.prefix]


def test_it_is_found_again(space, run, training, stages):
    first = export.fn(space, run, training, "float32")
    second = export.fn(space, run, training, "float32")
    assert second.reused
    assert (second.model.model_id, second.commit) == (first.model.model_id, first.commit)
    assert len(stages.calls) == 1
    assert len(models(space, run)) == 1


@pytest.mark.parametrize("damage", ["a byte", "a cut", "a loss"])
def test_an_export_that_was_damaged_is_written_again(space, run, training, stages, damage):
    first = export.fn(space, run, training, "float32")
    weights = space.storage.local_path(f"{first.prefix}/model.safetensors")
    whole = weights.read_bytes()
    if damage == "a loss":
        weights.unlink()
    else:
        weights.write_bytes(whole[:-1] + b"?" if damage == "a byte" else whole[:-1])
    again = export.fn(space, run, training, "float32")
    assert not again.reused
    assert (again.model.model_id, again.commit) == (first.model.model_id, first.commit)
    assert weights.read_bytes() == whole
    assert export.fn(space, run, training, "float32").reused


def test_another_type_is_another_export(space, run, training, stages):
    first = export.fn(space, run, training, "float32")
    second = export.fn(space, run, training, "bfloat16")
    assert second.key != first.key
    assert second.model.model_id != first.model.model_id


@pytest.mark.parametrize(
    ("owner", "function"),
    [
        ("headrace.storage.Storage", "create"),
        ("tasks.export", "run_module"),
        ("tests.tasks.stand_ins", "write_commit"),
        ("headrace.registry.Registry", "finish_model"),
    ],
    ids=["model made", "pointer written", "files written", "committed"],
)
def test_killed_anywhere_there_is_one_model_at_the_end(space, run, training, stages, monkeypatch, owner, function):
    with monkeypatch.context() as patch:
        patch.setattr(f"{owner}.{function}", die)
        with pytest.raises(Killed):
            export.fn(space, run, training, "float32")
    result = export.fn(space, run, training, "float32")
    assert models(space, run) == [(result.model.model_id, "READY")]
    assert export.fn(space, run, training, "float32").reused


def test_of_two_at_once_the_loser_removes_its_model(space, run, training, stages, monkeypatch):
    key = export_key(training.checkpoint.commit.digest, "float32")
    create = space.storage.create
    winner = []

    def create_after_the_other(name, data):
        if name == pointer_key(run.spec.run_prefix, key) and not winner:
            made = Registry(space.tracker).create_model(run.experiment_id, "tiny", run_id=run.run_id, tags={})
            winner.append(made.model_id)
            prefix = key_below(space.storage, made.location)
            create(name, f'{{"model_id": "{made.model_id}", "prefix": "{prefix}"}}'.encode())
        return create(name, data)

    monkeypatch.setattr(space.storage, "create", create_after_the_other)
    result = export.fn(space, run, training, "float32")
    assert result.model.model_id == winner[0]
    assert models(space, run) == [(winner[0], "READY")]


def test_a_model_that_was_deleted_in_mlflow_is_named(space, run, training, stages):
    result = export.fn(space, run, training, "float32")
    Registry(space.tracker).discard_model(result.model.model_id)
    with pytest.raises(NotFound, match="was deleted in MLflow"):
        export.fn(space, run, training, "float32")


def test_a_killed_stage_process_may_be_tried_again(space, run, training, monkeypatch):
    def killed(*_, **__):
        raise AttemptFailed("training.export.main was killed by SIGKILL.")

    monkeypatch.setattr("tasks.export.run_module", killed)
    with pytest.raises(AttemptFailed):
        export.fn(space, run, training, "float32")
    assert [status for _, status in models(space, run)] == ["PENDING"]


def test_a_stage_process_that_leaves_nothing_is_noticed(space, run, training, monkeypatch):
    monkeypatch.setattr("tasks.export.run_module", lambda *_, **__: {})
    with pytest.raises(DamagedData, match="has no commit"):
        export.fn(space, run, training, "float32")


def test_the_model_carries_the_key_and_the_run(space, run, training, stages):
    result = export.fn(space, run, training, "float32")
    tags = Registry(space.tracker).get_model(result.model.model_id).tags
    assert tags[EXPORT_TAG] == result.key
    assert tags["headrace.run_id"] == run.run_id


@pytest.mark.parametrize(
    ("root", "location", "key"),
    [
        ("/data/a store", "/data/a store/runs/models/m-1/artifacts", "runs/models/m-1/artifacts"),
        ("/data/a store", "file:///data/a store/runs/models/m-1/artifacts", "runs/models/m-1/artifacts"),
        ("s3://bucket/here", "s3://bucket/here/runs/models/m-1/artifacts", "runs/models/m-1/artifacts"),
    ],
)
def test_the_place_of_a_model_as_a_key_of_the_store(root, location, key):
    assert key_below(Storage.open(root), location) == key


@pytest.mark.parametrize("location", ["/data/other/runs/models/m-1", "s3://bucket/runs", "mlflow-artifacts:/1/models"])
def test_a_place_outside_the_store_is_refused(location):
    with pytest.raises(DamagedData, match="not below the store"):
        key_below(Storage.open("/data/store"), location)
