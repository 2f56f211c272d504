"""Logged models, versions and aliases against a real SQLite database of MLflow."""

from pathlib import Path

import pytest

from headrace.errors import NotFound
from headrace.mlmodel import mlmodel_document
from headrace.registry import ModelRecord, Registry
from headrace.tracking import Point, Tracker
from tests.mlflow_database import NOLOAD, new_database

pytestmark = pytest.mark.filterwarnings(NOLOAD)

KEY = {"headrace.export_key": "a" * 64}


@pytest.fixture
def tracker(tmp_path: Path) -> Tracker:
    return Tracker.connect(f"sqlite:///{new_database(tmp_path)}")


@pytest.fixture
def registry(tracker: Tracker) -> Registry:
    return Registry(tracker)


@pytest.fixture
def experiment(tracker: Tracker, tmp_path: Path) -> str:
    return tracker.ensure_experiment("here", str(tmp_path / "a store" / "runs"))


@pytest.fixture
def run_id(tracker: Tracker, experiment: str) -> str:
    return tracker.create_run(experiment, "a run", tags={}).run_id


@pytest.fixture
def model(registry: Registry, experiment: str, run_id: str) -> ModelRecord:
    return registry.create_model(experiment, "quick.start", run_id=run_id, tags=KEY)


def test_a_model_waits_for_its_files_below_the_store(model, tmp_path):
    assert not model.ready
    assert model.location == f"{tmp_path}/a store/runs/models/{model.model_id}/artifacts"
    assert model.tags["headrace.export_key"] == "a" * 64


def test_a_model_is_found_again_by_its_key(registry, experiment, model):
    assert registry.find_model(experiment, KEY) == model
    assert registry.find_model(experiment, {"headrace.export_key": "b" * 64}) is None


def test_the_ready_model_wins_over_one_that_waits(registry, experiment, run_id, model):
    second = registry.create_model(experiment, "quick.start", run_id=run_id, tags=KEY)
    registry.finish_model(second.model_id, run_id, 12)
    found = registry.find_model(experiment, KEY)
    assert found is not None
    assert (found.model_id, found.ready) == (second.model_id, True)


def test_finishing_twice_is_finishing_once(registry, run_id, model, tracker):
    for _ in range(2):
        registry.finish_model(model.model_id, run_id, 12)
    assert registry.get_model(model.model_id).ready
    outputs = tracker.client.get_run(run_id).outputs.model_outputs
    assert [(output.model_id, output.step) for output in outputs] == [(model.model_id, 12)]


def test_a_discarded_model_is_not_found(registry, experiment, model):
    registry.discard_model(model.model_id)
    assert registry.find_model(experiment, KEY) is None
    with pytest.raises(NotFound):
        registry.get_model(model.model_id)


def test_scores_of_a_model_are_written_once_for_each_evaluation(registry, run_id, model, tracker):
    for digest, value in (("d" * 64, 1.5), ("d" * 64, 1.5), ("e" * 64, 1.25), ("e" * 64, 1.25)):
        points = [Point("bits_per_byte", value, 12, 1_000)]
        registry.log_model_points(run_id, model.model_id, points, dataset_name="data", digest=digest)
    metrics = tracker.client.get_logged_model(model.model_id).metrics
    assert sorted((m.key, m.dataset_digest, m.value) for m in metrics) == [
        ("bits_per_byte", "d" * 36, 1.5),
        ("bits_per_byte.eeeeeeee", "e" * 36, 1.25),
    ]
    assert registry.get_model(model.model_id).measured_on == {"d" * 36, "e" * 36}
    # On the run, too, each metric has one value at a step.
    assert [point.value for point in tracker.history(run_id, "bits_per_byte")] == [1.5]
    assert [point.value for point in tracker.history(run_id, "bits_per_byte.eeeeeeee")] == [1.25]


def test_a_version_refers_to_the_files_and_copies_none(registry, run_id, model, tmp_path):
    folder = Path(model.location)
    folder.mkdir(parents=True)
    (folder / "weights.bin").write_bytes(b"x" * 1000)
    before = sorted(path for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".db")
    version = registry.create_version("quick.start", model, run_id=run_id, tags={**KEY, "headrace.step": "12"})
    assert (version.name, version.version, version.run_id) == ("quick.start", "1", run_id)
    assert version.tags["headrace.step"] == "12"
    after = sorted(path for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".db")
    assert after == before


def test_what_lies_there_is_loaded_through_the_alias(registry, run_id, model, monkeypatch, tmp_path):
    folder = Path(model.location)
    folder.mkdir(parents=True)
    (folder / "word.txt").write_text("echo")
    (tmp_path / "echoing_loader.py").write_text(
        "from pathlib import Path\n"
        "class Echo:\n"
        "    def __init__(self, word): self.word = word\n"
        "    def predict(self, data, params=None): return [self.word + str(t) for t in data.iloc[:, 0]]\n"
        "def _load_pyfunc(path): return Echo((Path(path) / 'word.txt').read_text())\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    facts = {"model_id": model.model_id, "run_id": run_id, "created_ms": model.created_ms}
    (folder / "MLmodel").write_bytes(mlmodel_document(**facts, loader_module="echoing_loader"))
    registry.finish_model(model.model_id, run_id, 12)
    registry.set_alias("quick", "champion", registry.create_version("quick", model, run_id=run_id, tags=KEY).version)

    import mlflow
    import pandas

    monkeypatch.setattr("mlflow.tracking._tracking_service.utils._tracking_uri", registry.tracker.uri)
    loaded = mlflow.pyfunc.load_model("models:/quick@champion")
    assert loaded.predict(pandas.DataFrame({"text": ["!"]})) == ["echo!"]
    assert loaded.predict(["!", "?"]) == ["echo!", "echo?"]


def test_a_version_is_found_again_by_its_key(registry, run_id, model):
    assert registry.find_version("quick", KEY) is None
    made = registry.create_version("quick", model, run_id=run_id, tags=KEY)
    registry.create_version("quick", model, run_id=run_id, tags={"headrace.export_key": "other"})
    assert registry.find_version("quick", KEY) == made
    assert [v.version for v in registry.versions("quick")] == ["1", "2"]
    assert registry.get_version("quick", "1") == made


def test_versions_beyond_nine_are_in_the_order_of_numbers(registry, run_id, model):
    for number in range(11):
        registry.create_version("quick", model, run_id=run_id, tags={"n": str(number)})
    assert [v.version for v in registry.versions("quick")] == [str(n) for n in range(1, 12)]


def test_an_alias_moves_at_once(registry, run_id, model):
    assert registry.version_by_alias("quick", "champion") is None
    first = registry.create_version("quick", model, run_id=run_id, tags={})
    assert registry.version_by_alias("quick", "champion") is None
    second = registry.create_version("quick", model, run_id=run_id, tags={})
    for version in (first, second, first):
        registry.set_alias("quick", "champion", version.version)
        holder = registry.version_by_alias("quick", "champion")
        assert holder is not None
        assert holder.version == version.version


def test_tags_of_a_version_are_replaced(registry, run_id, model):
    registry.create_version("quick", model, run_id=run_id, tags={"a": "1", "b": "2"})
    registry.set_version_tags("quick", "1", {"a": "3"})
    assert registry.get_version("quick", "1").tags == {"a": "3", "b": "2"}


def test_a_version_that_does_not_exist_is_not_found(registry):
    with pytest.raises(NotFound, match="quick"):
        registry.get_version("quick", "7")
    assert registry.versions("quick") == []
