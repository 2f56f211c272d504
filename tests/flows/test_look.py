"""What `runs ls`, `runs show` and `generate` find."""

import json

import pytest

from flows.look import connect, examine_run, find_run, list_runs, model_folder, run_account, show_run
from headrace.environment import home
from headrace.errors import InputError
from headrace.lease import hold
from headrace.registry import Registry
from headrace.storage import Storage
from headrace.tracking import Tracker
from tasks.evaluate import evaluate
from tasks.export import export
from tasks.register import register
from tasks.runs import Workspace, lease_key, resolve_run
from tasks.train import TrainingSession, train
from tests.mlflow_database import NOLOAD, new_database
from tests.tasks.stand_ins import DATA, DATASET, FakeRanks, FakeStages, make_request

pytestmark = pytest.mark.filterwarnings(NOLOAD)


@pytest.fixture
def space(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    tracker = Tracker.connect(f"sqlite:///{new_database(home())}")
    return Workspace(Storage.open(tmp_path / "runs" / "store"), tracker, home() / "work")


@pytest.fixture
def ranks(monkeypatch):
    fake = FakeRanks()
    monkeypatch.setattr("tasks.train.run_attempt", fake)
    return fake


@pytest.fixture
def registered(space, ranks, monkeypatch):
    fake = FakeStages(space.storage)
    monkeypatch.setattr("tasks.export.run_module", fake)
    monkeypatch.setattr("tasks.evaluate.run_module", fake)
    run = resolve_run(space, make_request(), DATASET)
    exported = export.fn(space, run, train.fn(space, run, TrainingSession()), "float32")
    register.fn(space, run, exported, evaluate.fn(space, run, exported), "tiny", DATA)
    space.tracker.set_status(run.run_id, "FINISHED")
    return run, exported


def test_without_a_database_nothing_is_made(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert connect() is None
    assert list_runs() == []
    with pytest.raises(InputError, match="no run 'x'"):
        find_run("x")
    with pytest.raises(InputError, match="no registered model 'x'"):
        model_folder("x")
    assert not (tmp_path / "home").exists()


def test_a_finished_run_in_one_line(registered):
    run, _ = registered
    [line] = list_runs()
    assert (line.run_id, line.name, line.status) == (run.run_id, "tiny", "FINISHED")
    assert (line.step, line.steps, line.attempts) == (12, 12, 1)
    assert (line.bits_per_byte, line.model, line.dataset) == (2.0, "tiny/1", DATASET.key)


def test_attempts_and_runs_of_others_are_no_runs(space, registered):
    run, _ = registered
    space.tracker.create_run(run.experiment_id, "by hand", tags={})
    assert [line.run_id for line in list_runs()] == [run.run_id]


def test_a_run_whose_command_was_killed_is_interrupted(space, ranks):
    ranks.ends = [6]
    run = resolve_run(space, make_request(), DATASET)
    with pytest.raises(Exception, match="killed"):
        train.fn(space, run, TrainingSession())
    with hold(space.storage, lease_key(run.run_id)):
        assert [line.status for line in list_runs()] == ["RUNNING"]
    [line] = list_runs()
    assert (line.status, line.step, line.steps) == ("INTERRUPTED", 4, 12)


def test_a_run_that_was_killed_before_its_document_is_listed(space):
    run = resolve_run(space, make_request(), DATASET)
    space.storage.delete(f"{run.spec.run_prefix}/run.json")
    [line] = list_runs()
    assert (line.step, line.steps, line.attempts) == (0, 0, 0)


def test_a_run_is_shown_by_id_prefix_and_name(registered):
    run, exported = registered
    shown = show_run(run.run_id)
    assert show_run(run.run_id[:6]) == shown
    assert show_run("tiny") == shown
    assert json.loads(json.dumps(shown)) == shown
    assert [c["step"] for c in shown["checkpoints"]] == [12, 8, 4]
    assert shown["attempt_log"][0]["restored_from"] is None
    assert shown["exports"][0].endswith(exported.prefix)
    assert shown["config"]["training"]["steps"] == 12
    assert shown["page"] is None, "no page without a server"


def test_the_newest_run_of_a_name_is_meant(space, registered):
    newer = resolve_run(space, make_request(seed=2, identity={"name": "tiny", "seed": 2}), DATASET)
    assert find_run("tiny")[1].run_id == newer.run_id
    assert list_runs()[0].run_id == newer.run_id


def test_a_name_that_is_none_says_what_there_is(registered):
    with pytest.raises(InputError, match="Runs by name: tiny"):
        show_run("other")


def test_a_model_by_every_name(space, registered, tmp_path):
    run, exported = registered
    folder = space.storage.local_path(exported.prefix)
    for name in ("tiny", "models:/tiny@champion", "models:/tiny/1", run.run_id, str(folder)):
        assert model_folder(name) == folder, name


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("models:/tiny@best", r"has no alias 'best'; its versions: 1"),
        ("models:/tiny/9", "has no version 9; its versions: 1"),
        ("other", "There is no registered model 'other'; there are: tiny."),
        ("0" * 32, "no run"),
    ],
)
def test_a_model_that_is_not_there_is_named(registered, name, told):
    with pytest.raises(InputError, match=told):
        model_folder(name)


@pytest.mark.parametrize("name", ["models:/tiny", "hf://x", "no/such/folder", "models:/a/b/c"])
def test_what_is_no_name_of_a_model_is_refused(registered, name):
    with pytest.raises(InputError, match="neither a folder nor a model"):
        model_folder(name)


def test_a_run_without_an_export_says_what_to_do(space, ranks):
    run = resolve_run(space, make_request(), DATASET)
    with pytest.raises(InputError, match="`headrace run` with its config makes one"):
        model_folder(run.run_id)


def test_a_version_of_somebody_else_is_not_ours(space, registered):
    run, exported = registered
    Registry(space.tracker).create_version("foreign", exported.model, run_id=run.run_id, tags={})
    with pytest.raises(InputError, match="not registered by headrace"):
        model_folder("models:/foreign/1")


def test_the_account_and_the_verdict_of_a_run_come_from_the_store(registered):
    run, _ = registered
    record, goodput = run_account(run.spec.name)
    assert record.run_id == run.run_id
    assert goodput.wall_seconds > 0
    assert goodput.failures == 0
    _, findings = examine_run(run.spec.name)
    assert findings[0].verdict == "finished"
    with pytest.raises(InputError, match="no run 'nobody'"):
        examine_run("nobody")


def test_one_damaged_run_does_not_hide_the_others(space, registered, ranks):
    run, _ = registered
    other = resolve_run(space, make_request(name="other", identity={"name": "other"}), DATASET)
    space.storage.write_bytes(f"{other.spec.run_prefix}/run.json", b"")
    lines = {line.run_id: line for line in list_runs()}
    assert lines[run.run_id].problem is None
    assert lines[other.run_id].status == "DAMAGED"
    assert "Move it away and give the run's command again" in lines[other.run_id].problem
    (finding,) = examine_run(other.run_id)[1]
    assert finding.verdict == "damaged document"
    space.storage.local_path(f"{other.spec.run_prefix}/run.json").unlink()
    assert examine_run(other.run_id)[1][0].verdict == "never started"
    again = resolve_run(space, make_request(name="other", identity={"name": "other"}), DATASET)
    assert again.run_id == other.run_id
    assert examine_run(other.run_id)[1][0].verdict == "never started"  # for want of an attempt
