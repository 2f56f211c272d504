"""The tracking client against a real SQLite database of MLflow."""

import json
import math
import os
import socket
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import sqlalchemy

from headrace.errors import ConfigError, NotFound, Terminal, TrackingUnavailable
from headrace.mlmodel import mlmodel_document
from headrace.tracking import Point, Tracker, metric_entities
from headrace.tracking_address import (
    default_uri,
    is_server,
    redact,
    require_answer,
    run_page,
    server_answers,
    server_arguments,
)
from tests.mlflow_database import NOLOAD, new_database

pytestmark = pytest.mark.filterwarnings(NOLOAD)


@pytest.fixture
def database(tmp_path: Path) -> Path:
    return new_database(tmp_path)


@pytest.fixture
def tracker(database: Path) -> Tracker:
    return Tracker.connect(f"sqlite:///{database}")


@pytest.fixture
def root(tmp_path: Path) -> str:
    return str(tmp_path / "store" / "runs")


@pytest.fixture
def run_id(tracker: Tracker, root: str) -> str:
    return tracker.create_run(tracker.ensure_experiment("here", root), "a run", tags={}).run_id


def losses(steps: range, started_ms: int = 1_000) -> list[Point]:
    return [Point("train/loss", 1.0 / step, step, started_ms + step) for step in steps]


# -------------------------------------------------------------------------------------------------------- addresses


def test_the_default_is_a_database_in_the_state_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert default_uri() == f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://tracking:5000")
    assert default_uri() == "http://tracking:5000"


def test_an_address_is_shown_without_its_credentials():
    assert redact("http://me:secret@host:5000/x") == "http://***@host:5000/x"
    assert redact("postgresql://me:secret@db/mlflow") == "postgresql://***@db/mlflow"
    assert redact("sqlite:////a/b.db") == "sqlite:////a/b.db"


def test_only_servers_have_pages():
    assert is_server("https://host")
    assert not is_server("sqlite:///x.db")
    assert run_page("http://me:pw@host:1/", "4", "ab") == (
        "http://***@host:1/#/experiments/4/runs/ab?workflowType=machine_learning"
    )


def test_a_server_that_is_not_there_is_named_within_seconds():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        uri = f"http://me:secret@127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(TrackingUnavailable, match=r"at http://\*\*\*@127\.0\.0\.1:\d+ does not answer"):
            Tracker.connect(uri)
        assert not server_answers(uri)


def test_a_server_that_accepts_and_says_nothing_is_given_up():
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        assert not server_answers(f"http://127.0.0.1:{silent.getsockname()[1]}", timeout=0.2)


def test_a_database_that_cannot_be_opened_is_named(tmp_path):
    with pytest.raises(TrackingUnavailable, match=f"database at sqlite:///{tmp_path} cannot be opened"):
        Tracker.connect(f"sqlite:///{tmp_path}")
    (tmp_path / "text.db").write_text("this is no database, and it is longer than a header of one hundred bytes " * 3)
    with pytest.raises(TrackingUnavailable, match="not a database"):
        Tracker.connect(f"sqlite:///{tmp_path}/text.db")


def test_a_database_server_that_is_not_there_is_named_without_its_password():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        uri = f"postgresql://me:secret@127.0.0.1:{free.getsockname()[1]}/mlflow"
        with pytest.raises(TrackingUnavailable) as caught:
            Tracker.connect(uri)
    assert "postgresql://***@127.0.0.1" in str(caught.value)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("uri", ["mlruns", "file:///mlruns", "databricks", "postgresql:///no-host"])
def test_addresses_of_other_kinds_are_refused(uri):
    with pytest.raises(ConfigError, match="MLFLOW_TRACKING_URI"):
        Tracker.connect(uri)


def test_the_folder_of_the_database_is_made(tmp_path):
    require_answer(f"sqlite:///{tmp_path}/new/home/mlflow.db")
    assert (tmp_path / "new" / "home").is_dir()


def test_settings_are_in_place_before_mlflow_is_loaded(tmp_path, database):
    code = (
        "import os, sys, json\n"
        "from headrace.tracking import Tracker\n"
        "assert 'mlflow' not in sys.modules\n"
        f"Tracker.connect('sqlite:///{database}')\n"
        "names = ('MLFLOW_DISABLE_TELEMETRY', 'DO_NOT_TRACK')\n"
        "print(json.dumps([[os.environ[n] for n in names], 'torch' in sys.modules, sorted(os.listdir('.'))]))\n"
    )
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MLFLOW") and k != "DO_NOT_TRACK"}
    folder = tmp_path / "cwd"
    folder.mkdir()
    environment["PYTHONPATH"] = str(Path(__file__).parents[2])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=folder, env=environment)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [["true", "true"], False, []]
    assert done.stderr == ""


# ------------------------------------------------------------------------------------------------------ experiments


def test_an_experiment_is_made_once(tracker, root):
    first = tracker.ensure_experiment("here", root)
    assert tracker.ensure_experiment("here", root) == first
    assert tracker.experiment_name(first) == "here"


@pytest.mark.parametrize("spelling", ["file://{root}", "{root}/", "{root}"])
def test_one_place_in_several_spellings_is_one_place(tracker, root, spelling):
    first = tracker.ensure_experiment("here", root)
    assert tracker.ensure_experiment("here", spelling.format(root=root)) == first


def test_an_experiment_of_another_store_is_refused_with_the_way_out(tracker, root):
    tracker.ensure_experiment("here", root)
    with pytest.raises(ConfigError) as caught:
        tracker.ensure_experiment("here", "s3://bucket/runs")
    message = str(caught.value)
    assert root in message
    assert "s3://bucket/runs" in message
    assert "tracking.experiment" in message


def test_a_deleted_experiment_is_refused_with_the_way_out(tracker, root):
    found = tracker.ensure_experiment("here", root)
    tracker.client.delete_experiment(found)
    with pytest.raises(ConfigError, match="mlflow experiments restore"):
        tracker.ensure_experiment("here", root)


def test_an_experiment_that_another_process_makes_meanwhile_is_taken(tracker, root, monkeypatch):
    made = tracker.ensure_experiment("here", root)
    asked = []
    real = tracker._experiment
    monkeypatch.setattr(tracker, "_experiment", lambda name: real(name) if asked else asked.append(name))
    assert tracker.ensure_experiment("here", root) == made


# ------------------------------------------------------------------------------------------------------------- runs


def test_the_files_of_a_run_lie_below_the_root(tracker, root, run_id):
    record = tracker.get_run(run_id)
    assert record.artifact_root == f"{root}/{run_id}/artifacts"
    assert (record.name, record.status, record.deleted) == ("a run", "RUNNING", False)


def test_attempts_are_nested_below_their_run(tracker, root, run_id):
    experiment = tracker.get_run(run_id).experiment_id
    child = tracker.create_run(experiment, "attempt 1", tags={"headrace.attempt": "1"}, parent_id=run_id)
    assert [r.run_id for r in tracker.children(experiment, run_id)] == [child.run_id]
    assert child.tags["mlflow.parentRunId"] == run_id


def test_runs_are_found_by_all_their_tags_oldest_first(tracker, root):
    experiment = tracker.ensure_experiment("here", root)
    made = [tracker.create_run(experiment, f"r{i}", tags={"k": "v", "i": str(i % 2)}).run_id for i in range(4)]
    assert [r.run_id for r in tracker.find_runs(experiment, {"k": "v"})] == made
    assert [r.run_id for r in tracker.find_runs(experiment, {"k": "v", "i": "1"})] == made[1::2]
    assert tracker.find_runs(experiment, {"k": "other"}) == []


def test_a_run_that_does_not_exist_is_not_found(tracker):
    with pytest.raises(NotFound, match="0" * 32):
        tracker.get_run("0" * 32)


@pytest.mark.parametrize("status", ["FINISHED", "FAILED", "KILLED"])
def test_statuses_are_what_was_said(tracker, run_id, status):
    tracker.set_status(run_id, status)
    assert tracker.get_run(run_id).status == status
    tracker.set_status(run_id, "RUNNING")
    assert tracker.get_run(run_id).status == "RUNNING"


def test_a_deleted_run_says_so(tracker, run_id):
    tracker.delete_run(run_id)
    assert tracker.get_run(run_id).deleted
    with pytest.raises(Terminal, match="refused"):
        tracker.set_tags(run_id, {"a": "b"})


def test_parameters_are_written_once_and_never_changed(tracker, run_id):
    tracker.log_params(run_id, {"a": "1", "long": "x" * 10_000})
    tracker.log_params(run_id, {"a": "2", "b": "3"})
    params = tracker.params(run_id)
    assert (params["a"], params["b"], len(params["long"])) == ("1", "3", 6000)


def test_more_parameters_than_fit_one_call(tracker, run_id):
    wanted = {f"p{i}": str(i) for i in range(250)}
    tracker.log_params(run_id, wanted)
    assert tracker.params(run_id) == wanted


# ----------------------------------------------------------------------------------------------------------- points


def test_a_repeated_batch_is_stored_once(tracker, run_id):
    points = losses(range(1, 1500))
    tracker.log_points(run_id, points)
    tracker.log_points(run_id, points)
    tracker.log_points(run_id, points[500:])
    assert tracker.history(run_id, "train/loss") == points


def test_a_batch_that_overlaps_adds_only_what_is_new(tracker, run_id):
    tracker.log_points(run_id, losses(range(1, 11)))
    tracker.log_points(run_id, losses(range(5, 21)))
    assert tracker.history(run_id, "train/loss") == losses(range(1, 21))


def test_another_time_would_be_another_point(tracker, run_id):
    # This is why points carry the time of their event and never the time at which they are sent.
    tracker.log_points(run_id, [Point("x", 1.0, 1, 1000)])
    tracker.log_points(run_id, [Point("x", 1.0, 1, 1001)])
    assert len(tracker.history(run_id, "x")) == 2


def test_values_that_are_not_finite_survive(tracker, run_id):
    tracker.log_points(run_id, [Point("x", math.nan, 1, 1), Point("x", math.nan, 1, 1), Point("y", math.inf, 1, 1)])
    assert [math.isnan(p.value) for p in tracker.history(run_id, "x")] == [True]
    assert tracker.history(run_id, "y")[0].value > 1e308


def test_the_last_step_of_each_metric(tracker, run_id):
    tracker.log_points(run_id, losses(range(1, 8)))
    tracker.log_points(run_id, [Point("validation/loss", 2.0, 4, 9), Point("validation/loss", 2.5, 0, 1)])
    assert tracker.last_steps(run_id) == {"train/loss": 7, "validation/loss": 4}


def test_a_locked_database_is_away_and_not_refused(tracker, run_id, database, monkeypatch):
    # MLflow waits twenty seconds for a lock; here it does not wait.
    text = sqlalchemy.sql.text
    monkeypatch.setattr(
        "mlflow.store.db.utils.sql.text",
        lambda statement: text("PRAGMA busy_timeout = 1;" if "busy_timeout" in statement else statement),
    )
    other = sqlite3.connect(database, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    try:
        with pytest.raises(TrackingUnavailable, match="locked"):
            tracker.log_points(run_id, losses(range(1, 3)))
    finally:
        other.execute("ROLLBACK")
        other.close()
    tracker.log_points(run_id, losses(range(1, 3)))
    assert tracker.history(run_id, "train/loss") == losses(range(1, 3))


def test_what_the_database_itself_says_is_away_and_not_a_defect(tracker, monkeypatch):
    def fail(*_, **__):
        raise sqlalchemy.exc.OperationalError("ALTER TABLE x", {}, Exception("duplicate column name: step"))

    monkeypatch.setattr(tracker.client, "get_experiment_by_name", fail)
    with pytest.raises(TrackingUnavailable, match="duplicate column name: step") as caught:
        tracker.ensure_experiment("here", "/x")
    assert "ALTER TABLE" not in str(caught.value)


def test_a_defect_of_ours_is_not_hidden(tracker, monkeypatch):
    monkeypatch.setattr(tracker.client, "get_experiment_by_name", lambda name: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        tracker.ensure_experiment("here", "/x")


@pytest.mark.slow
def test_two_commands_make_the_first_database_together(tmp_path):
    code = f"from headrace.tracking import Tracker\nTracker.connect('sqlite:///{tmp_path}/mlflow.db')\n"
    both = [subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True) for _ in range(2)]
    for process in both:
        _, said = process.communicate(timeout=120)
        assert process.returncode == 0, said


def test_threads_may_share_a_tracker(tracker, run_id):
    def work(worker: int) -> None:
        for step in range(20):
            tracker.log_points(run_id, [Point(f"w{worker}", float(step), step, step)])

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert tracker.last_steps(run_id) == {f"w{n}": 19 for n in range(4)}


def test_a_dataset_is_shown_once_with_its_digest_and_place(tracker, run_id):
    for _ in range(2):
        tracker.log_dataset(run_id, name="d-1", digest="f" * 64, source="s3://bucket/datasets/d-1/manifest.json")
    inputs = tracker.client.get_run(run_id).inputs.dataset_inputs
    assert [(i.dataset.name, i.dataset.digest) for i in inputs] == [("d-1", "f" * 36)]
    assert json.loads(inputs[0].dataset.source) == {"uri": "s3://bucket/datasets/d-1/manifest.json"}


# ----------------------------------------------------------------------------------------------------------- models


def test_the_model_document_is_the_same_when_it_is_made_again():
    facts = {"model_id": "m-" + "a" * 32, "run_id": "b" * 32, "loader_module": "x.y", "created_ms": 1_700_000_000_123}
    document = mlmodel_document(**facts)
    assert mlmodel_document(**facts) == document
    assert b"loader_module: x.y" in document
    assert b"utc_time_created: '2023-11-14 22:13:20.123000'" in document
    assert b"model_uuid: " + b"a" * 32 in document


def test_points_of_a_model_carry_model_and_dataset():
    metric = metric_entities([Point("x", 1.0, 2, 3)], model_id="m-1", dataset_name="d", digest="e" * 64)[0]
    assert (metric.key, metric.value, metric.step, metric.timestamp) == ("x", 1.0, 2, 3)
    assert (metric.model_id, metric.dataset_name, metric.dataset_digest) == ("m-1", "d", "e" * 36)


def test_the_server_serves_loopback_only():
    command = server_arguments(5001)
    assert command[command.index("--host") + 1] == "127.0.0.1"
    assert command[command.index("--port") + 1] == "5001"
