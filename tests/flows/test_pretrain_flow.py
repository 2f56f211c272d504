"""The flow on a real store, a real MLflow database and a real Prefect; ranks and stage processes are stand-ins."""

import json
import sqlite3

import pytest
from prefect.client.orchestration import get_client
from prefect.exceptions import CancelledRun

from data_prep.dataset import prepare as prepare_dataset
from flows.config import PipelineConfig
from flows.evaluate_flow import evaluate_model
from flows.prepare_flow import prepare_data
from flows.pretrain_flow import pretrain
from flows.register_flow import register_model
from flows.train_flow import train_model
from headrace.config import merge
from headrace.config_check import parse
from headrace.errors import ConfigError, InputError, StorageUnavailable, Terminal, TrackingUnavailable
from headrace.storage import Storage
from headrace.tracking import Tracker
from tasks.evaluate import evaluate
from tasks.export import export
from tasks.prepare import prepare
from tasks.record import complete_run, open_run
from tasks.register import register
from tasks.train import train
from tests.mlflow_database import NOLOAD, new_database
from tests.tasks.stand_ins import FakeRanks, FakeStages
from training.launch.diagnosis import AttemptOutcome

pytestmark = [pytest.mark.filterwarnings(NOLOAD), pytest.mark.usefixtures("prefect_server")]

CANARIES = {
    "AWS_ACCESS_KEY_ID": "AKIA" + "CANARY0000000001",
    "AWS_SECRET_ACCESS_KEY": "canary/secret+key/0123456789abcdefghij",
    "AWS_SESSION_TOKEN": "canary-session-token-0123456789",
    "MLFLOW_TRACKING_PASSWORD": "canary-tracking-password",
}


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for stage in (prepare, open_run, train, export, evaluate, register, complete_run):
        monkeypatch.setattr(stage, "retry_delay_seconds", 0)
    new_database(tmp_path / "home")
    return tmp_path / "home"


@pytest.fixture
def ranks(monkeypatch):
    fake = FakeRanks()
    monkeypatch.setattr("tasks.train.run_attempt", fake)
    return fake


@pytest.fixture
def stages(monkeypatch, home):
    fake = FakeStages(Storage.open(home / "store"))
    monkeypatch.setattr("tasks.export.run_module", fake)
    monkeypatch.setattr("tasks.evaluate.run_module", fake)
    return fake


@pytest.fixture
def config(home, corpus):
    document = {
        "name": "tiny",
        "data": {"name": "tiny", "inputs": [{"path": str(corpus)}], "validation_fraction": 0.2, "processes": 1},
        "tokenizer": {"vocab_size": 300},
        "model": {
            "vocab_size": 512,
            "dim": 32,
            "num_layers": 2,
            "num_heads": 2,
            "num_kv_heads": 1,
            "ffn_dim": 64,
            "max_seq_len": 32,
        },
        "training": {"steps": 12, "global_batch_size": 8, "seq_len": 32, "precision": "float32"},
        "schedule": {"warmup_steps": 2},
        "launch": {"ranks_per_node": 2},
        "layout": {"micro_batch_size": 4, "device": "cpu"},
        "checkpoint": {"save_every": 4},
    }

    def make(**changes):
        return parse(PipelineConfig, merge(document, changes))

    return make


def status_of(home, run_id):
    return Tracker.connect(f"sqlite:///{home}/mlflow.db").get_run(run_id).status


def only_run(home):
    return json.loads(next((home / "store" / "run-keys").iterdir()).read_text())["run_id"]


def test_from_text_to_a_version_and_again_everything_reused(home, config, ranks, stages):
    first = pretrain(config())
    assert [(stage.name, stage.outcome) for stage in first.stages] == [
        ("prepare", "done"),
        ("train", "done"),
        ("export", "done"),
        ("evaluate", "done"),
        ("register", "done"),
    ]
    assert (first.step, first.attempts, first.version, first.new_version, first.champion) == (12, 1, "1", True, True)
    assert first.bits_per_byte.model_dump() == {"model": 2.0, "untrained": 4.5, "unigram": 3.5, "bigram": 3.0}
    assert first.pages == {}
    assert status_of(home, first.run_id) == "FINISHED"

    again = pretrain(config())
    assert {stage.outcome for stage in again.stages} == {"reused"}
    assert (again.run_id, again.version, again.new_version, again.champion) == (first.run_id, "1", False, True)
    assert len(ranks.specs) == 1
    assert status_of(home, first.run_id) == "FINISHED"


def test_the_flow_run_keeps_a_report(home, config, ranks, stages):
    with get_client(sync_client=True) as client:
        before = {artifact.id for artifact in client.read_artifacts()}
        result = pretrain(config())
        found = {a.key: a for a in client.read_artifacts() if a.id not in before}
    assert set(found) == {"training", "loss", "summary", "stages"}
    assert len({artifact.flow_run_id for artifact in found.values()}) == 1
    assert float(found["training"].data) == 100.0
    assert "step 12/12" in found["training"].description
    assert [row["name"] for row in json.loads(found["stages"].data)] == [stage.name for stage in result.stages]
    assert [row["step"] for row in json.loads(found["loss"].data)] == list(range(13))
    assert f"Run `{result.run_id}`, step 12." in found["summary"].data
    assert "## Loss" in found["summary"].data
    assert "| 12 | 0.5000 |" in found["summary"].data


def test_each_stage_is_a_flow_that_reuses_those_before_it(home, config, ranks, stages):
    prepared = prepare_data(config())
    assert [(stage.name, stage.outcome) for stage in prepared.stages] == [("prepare", "done")]
    assert (prepared.run_id, prepared.step) == (None, None)
    assert not (home / "store" / "run-keys").exists(), "a dataset alone makes no run"

    trained = train_model(config())
    assert [(stage.name, stage.outcome) for stage in trained.stages] == [("prepare", "reused"), ("train", "done")]
    assert (trained.dataset, trained.step, trained.attempts, trained.export) == (prepared.dataset, 12, 1, None)
    assert status_of(home, trained.run_id) == "FINISHED"

    evaluated = evaluate_model(config())
    assert [stage.outcome for stage in evaluated.stages] == ["reused", "reused", "done", "done"]
    assert (evaluated.run_id, evaluated.bits_per_byte) == (trained.run_id, 2.0)

    registered = register_model(config())
    assert [stage.outcome for stage in registered.stages] == ["reused"] * 4 + ["done"]
    assert (registered.run_id, registered.version, registered.champion) == (trained.run_id, "1", True)
    assert len(ranks.specs) == 1


def test_prefect_retries_from_the_last_commit_until_it_is_done(home, config, ranks, stages):
    ranks.ends = [6, 10, None]
    result = pretrain(config())
    assert (result.step, result.attempts) == (12, 3)
    assert [spec.restore.step if spec.restore else 0 for spec in ranks.specs] == [0, 4, 8]
    tracker = Tracker.connect(f"sqlite:///{home}/mlflow.db")
    assert [point.step for point in tracker.history(result.run_id, "train/loss")] == list(range(1, 13))


def test_attempts_without_progress_end_the_run_as_failed(home, config, ranks, stages):
    ranks.ends = [1, 2, 3]
    with pytest.raises(Terminal, match=r"3 attempts in a row .* killed \(launch 1\)"):
        pretrain(config())
    assert len(ranks.specs) == 3
    assert status_of(home, only_run(home)) == "FAILED"
    assert pretrain(config()).step == 12, "the same command may try again"
    assert status_of(home, only_run(home)) == "FINISHED"


@pytest.mark.parametrize(
    ("end", "raised"),
    [
        (KeyboardInterrupt(), KeyboardInterrupt),
        (AttemptOutcome(kind="stopped", message="Stopped and saved at step 6.", step=6), CancelledRun),
    ],
    ids=["interrupt", "stop"],
)
def test_a_stopped_run_is_killed_in_mlflow_and_continues(home, config, ranks, stages, end, raised):
    ranks.ends = [(6, end), None]
    with pytest.raises(raised):
        pretrain(config())
    assert status_of(home, only_run(home)) == "KILLED"
    result = pretrain(config())
    assert (result.step, result.attempts) == (12, 2)
    assert status_of(home, result.run_id) == "FINISHED"


def test_a_stopped_run_is_cancelled_in_prefect_and_the_flow_itself_never_retries(home, config, ranks, stages):
    ranks.ends = [(6, AttemptOutcome(kind="stopped", message="Stopped and saved at step 6.", step=6))]
    state = pretrain(config(), return_state=True)
    assert state.is_cancelled()
    assert state.message == "Stopped and saved at step 6. The same command continues from there."
    assert pretrain.retries == 0


def test_a_defect_is_failed_and_not_tried_again(home, config, ranks, stages):
    ranks.ends = [(6, RuntimeError("a defect"))]
    with pytest.raises(RuntimeError, match="a defect"):
        pretrain(config())
    assert len(ranks.specs) == 1
    assert status_of(home, only_run(home)) == "FAILED"


def test_a_changed_layout_continues_the_same_run(home, config, ranks, stages):
    first = pretrain(config())
    again = pretrain(config(launch={"ranks_per_node": 4}, layout={"micro_batch_size": 2}))
    assert again.run_id == first.run_id
    assert again.stages[1].outcome == "reused"


def test_a_changed_learning_rate_is_another_run_on_the_same_data(home, config, ranks, stages):
    first = pretrain(config())
    stages.scores.clear()
    other = pretrain(config(optimizer={"learning_rate": 0.01}))
    assert other.run_id != first.run_id
    assert other.dataset == first.dataset
    assert (other.stages[0].outcome, other.stages[1].outcome) == ("reused", "done")
    assert (other.version, other.champion) == ("2", False), "equal is not better"


def test_a_changed_evaluation_does_not_retrain(home, config, ranks, stages):
    first = pretrain(config())
    again = pretrain(config(evaluation={"max_tokens": 64}))
    outcomes = {stage.name: stage.outcome for stage in again.stages}
    assert outcomes == {
        "prepare": "reused",
        "train": "reused",
        "export": "reused",
        "evaluate": "done",
        "register": "reused",
    }
    assert (again.run_id, again.version) == (first.run_id, first.version)
    assert again.evaluation["digest"] != first.evaluation["digest"]


def test_a_vocabulary_larger_than_the_models_stops_before_a_run_is_made(home, config, ranks, corpus):
    with pytest.raises(ConfigError, match=r"has \d+ tokens, but model.vocab_size is 280"):
        pretrain(config(tokenizer={"path": str(_tokenizer_of(home, config, ranks))}, model={"vocab_size": 280}))
    assert not (home / "store" / "run-keys").exists()


def _tokenizer_of(home, config, ranks):
    """A tokenizer with 300 tokens, as this corpus gives it."""
    storage = Storage.open(home / "elsewhere")
    made = prepare_dataset(storage, config().data, config().tokenizer, work_dir=home / "scratch")
    return storage.local_path(f"tokenizers/{made.tokenizer_key}/tokenizer.json")


def test_too_little_text_stops_before_a_run_is_made(home, config, tmp_path, ranks):
    folder = tmp_path / "little"
    folder.mkdir()
    for number in range(3):
        (folder / f"{number}.txt").write_text(f"only {number}")
    with pytest.raises(InputError, match="one sequence needs"):
        pretrain(config(data={"inputs": [{"path": str(folder)}]}))
    assert not (home / "store" / "run-keys").exists()


def test_no_matching_file_is_refused(home, config, tmp_path):
    with pytest.raises(InputError):
        pretrain(config(data={"inputs": [{"path": str(tmp_path / "nothing")}]}))


def test_mlflow_down_at_the_start_is_one_sentence_and_nothing_starts(home, config, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    with pytest.raises(TrackingUnavailable, match=r"http://127\.0\.0\.1:9 does not answer"):
        pretrain(config())
    assert not (home / "store" / "units").exists()


def test_a_store_that_is_away_for_a_moment_is_tried_again(home, config, ranks, stages, monkeypatch):
    failures = [StorageUnavailable("503"), StorageUnavailable("503")]

    def sometimes(*arguments, **options):
        if failures:
            raise failures.pop()
        return prepare_dataset(*arguments, **options)

    monkeypatch.setattr("tasks.prepare.prepare_dataset", sometimes)
    assert pretrain(config()).step == 12
    assert failures == []


def test_an_mlflow_that_is_away_for_a_moment_is_tried_again(home, config, ranks, stages, monkeypatch):
    failures = [TrackingUnavailable("away")] * 6
    real = Tracker.calls

    def sometimes(self, what):
        if ("parameters" in what or "ready" in what or "new version" in what) and failures:
            raise failures.pop()
        return real(self, what)

    monkeypatch.setattr(Tracker, "calls", sometimes)
    result = pretrain(config())
    assert failures == []
    assert (result.version, result.champion) == ("1", True)


def test_credentials_in_the_environment_end_nowhere(home, config, ranks, stages, monkeypatch, caplog, capfd):
    for name, value in CANARIES.items():
        monkeypatch.setenv(name, value)
    ranks.ends = [6, None]
    result = pretrain(config())
    text = json.dumps(result.model_dump(mode="json")) + caplog.text + "".join(capfd.readouterr())
    for canary in CANARIES.values():
        assert canary not in text
        for path in home.rglob("*"):
            if path.is_file():
                assert canary.encode() not in path.read_bytes(), path
    database = sqlite3.connect(home / "mlflow.db")
    dump = "\n".join(database.iterdump())
    database.close()
    assert not any(canary in dump for canary in CANARIES.values())
    assert result.run_id in dump, "the dump is not empty"
