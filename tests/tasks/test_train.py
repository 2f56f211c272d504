"""One try is one attempt; what MLflow shows afterwards; and when the run ends."""

import threading

import pytest

from headrace.errors import AttemptFailed, Cancelled, ConfigError, Terminal, TrackingUnavailable
from headrace.tracking import Tracker
from tasks.runs import resolve_run
from tasks.shown import ATTEMPT_TAG, bring_up_to_date
from tasks.train import TrainingSession, train
from tests.mlflow_database import NOLOAD
from tests.tasks.stand_ins import DATASET, DeadMirror, make_request
from training.checkpoint.catalog import list_commits
from training.checkpoint.config import CheckpointConfig
from training.launch.attempts import read_attempts
from training.launch.config import LaunchConfig
from training.launch.diagnosis import AttemptOutcome
from training.launch.resume import next_attempt

pytestmark = pytest.mark.filterwarnings(NOLOAD)

STEPS = list(range(1, 13))


@pytest.fixture
def run(space):
    return resolve_run(space, make_request(), DATASET)


def steps_in_mlflow(space, run_id, key="train/loss"):
    return [point.step for point in space.tracker.history(run_id, key)]


def attempts_in_mlflow(space, run):
    children = space.tracker.children(run.experiment_id, run.run_id)
    return {int(child.tags[ATTEMPT_TAG]): child.status for child in children}


def test_one_attempt_that_finishes(space, run, ranks):
    session = TrainingSession()
    result = train.fn(space, run, session)
    assert (result.step, result.attempts, result.reused) == (12, 1, False)
    assert session.last_metrics["step"] == 12
    assert steps_in_mlflow(space, run.run_id) == STEPS
    assert steps_in_mlflow(space, run.run_id, "validation/bits_per_byte") == [0]
    assert attempts_in_mlflow(space, run) == {1: "FINISHED"}


def test_a_finished_run_is_a_no_op(space, run, ranks):
    train.fn(space, run, TrainingSession())
    again = train.fn(space, run, TrainingSession())
    assert (again.step, again.attempts, again.reused) == (12, 1, True)
    assert len(ranks.specs) == 1


def test_a_killed_rank_is_another_attempt_from_the_last_commit(space, run, ranks):
    ranks.ends = [6, None]
    session = TrainingSession()
    with pytest.raises(AttemptFailed, match="Rank 1 was killed"):
        train.fn(space, run, session)
    result = train.fn(space, run, session)
    assert (result.step, result.attempts, result.reused) == (12, 2, False)
    restore = ranks.specs[1].restore
    assert restore is not None
    assert (restore.attempt, restore.step) == (1, 4)
    assert steps_in_mlflow(space, run.run_id) == STEPS
    assert attempts_in_mlflow(space, run) == {1: "FAILED", 2: "FINISHED"}


def test_an_attempt_that_goes_back_is_not_told_as_a_failure(space, run, ranks, capsys):
    asked = AttemptOutcome(kind="failed", message="Step 6 gave a spike: the run goes back.", error_kind="Rewind")
    ranks.ends = [(5, asked), 6]
    session = TrainingSession()
    for _ in range(2):
        with pytest.raises(AttemptFailed):
            train.fn(space, run, session)
    lines = capsys.readouterr().err.splitlines()
    assert "train: attempt 1 goes back: Step 6 gave a spike: the run goes back." in lines
    assert "train: attempt 2 failed: Rank 1 was killed (launch 2)." in lines


def test_the_attempt_shows_what_happened_and_the_parent_what_counts(space, run, ranks):
    ranks.ends = [6]
    with pytest.raises(AttemptFailed):
        train.fn(space, run, TrainingSession())
    child = space.tracker.children(run.experiment_id, run.run_id)[0]
    assert steps_in_mlflow(space, child.run_id) == STEPS[:6]
    assert steps_in_mlflow(space, run.run_id) == STEPS[:4]


def test_attempts_without_progress_end_the_run_with_the_first_cause(space, run, ranks):
    ranks.ends = [5, 5, 6, 7, None]
    session = TrainingSession()
    for _ in range(3):
        with pytest.raises(AttemptFailed):
            train.fn(space, run, session)
    with pytest.raises(Terminal) as caught:
        train.fn(space, run, session)
    assert len(ranks.specs) == 4, "the first one committed step 4, three more committed nothing"
    assert "3 attempts in a row" in str(caught.value)
    assert "Rank 1 was killed (launch 2)." in str(caught.value)
    assert not caught.value.retryable


def test_the_same_command_again_may_try_again_after_such_an_end(space, run, ranks):
    space_run = resolve_run(
        space, make_request(launch=LaunchConfig(ranks_per_node=2, max_attempts_without_progress=1)), DATASET
    )
    ranks.ends = [2, 2, None]
    for _ in range(2):
        with pytest.raises(Terminal):
            train.fn(space, space_run, TrainingSession())
    assert train.fn(space, space_run, TrainingSession()).step == 12


def test_a_failure_that_trying_again_cannot_cure_is_raised_as_it_is(space, run, ranks):
    refused = AttemptOutcome(kind="failed", message="vocab_size", error_kind="ConfigError", retryable=False)
    ranks.ends = [(3, refused)]
    with pytest.raises(ConfigError, match="vocab_size"):
        train.fn(space, run, TrainingSession())


def test_a_stop_from_outside_is_saved_and_resumable(space, run, ranks):
    ranks.ends = [(6, AttemptOutcome(kind="stopped", message="Stopped and saved at step 6.", step=6))]
    with pytest.raises(Cancelled, match=r"Stopped and saved at step 6\. The same command continues") as caught:
        train.fn(space, run, TrainingSession())
    assert caught.value.exit_code == 3
    assert attempts_in_mlflow(space, run) == {1: "KILLED"}


def test_a_stop_that_comes_with_the_last_step_stops_the_command(space, run, ranks):
    """Nothing of the training is lost, and the next stage does not begin."""
    asked = iter([False] * 12 + [True])  # once before each step, and when all are done
    with pytest.raises(Cancelled, match="Stopped before the next stage"):
        train.fn(space, run, TrainingSession(should_stop=lambda: next(asked)))
    assert train.fn(space, run, TrainingSession()).reused


def test_should_stop_is_asked_while_the_attempt_runs(space, run, ranks):
    asked = []

    def should_stop() -> bool:
        asked.append(1)
        return len(asked) > 3

    with pytest.raises(Cancelled):
        train.fn(space, run, TrainingSession(should_stop=should_stop))
    assert len(asked) == 4


def test_a_later_attempt_of_somebody_else_ends_this_one(space, run, ranks, monkeypatch):
    monkeypatch.setattr("tasks.train.FENCE_SECONDS", 0.0)
    ranks.ends = [None]
    original = ranks.__class__.__call__

    def overtaken(self, storage, spec, **callbacks):
        next_attempt(storage, spec.run, work_root=space.work_dir / "elsewhere")
        return original(self, storage, spec, **callbacks)

    monkeypatch.setattr(type(ranks), "__call__", overtaken)
    with pytest.raises(Cancelled):
        train.fn(space, run, TrainingSession())
    assert steps_in_mlflow(space, run.run_id) == []


@pytest.mark.parametrize("end", [KeyboardInterrupt(), RuntimeError("a defect")])
def test_the_attempt_is_killed_in_mlflow_whatever_ends_the_task(space, run, ranks, end):
    ranks.ends = [(5, end)]
    with pytest.raises(type(end)):
        train.fn(space, run, TrainingSession())
    assert attempts_in_mlflow(space, run) == {1: "KILLED"}


def test_what_a_killed_command_left_open_is_completed_by_the_next(space, run, ranks, monkeypatch):
    """The flow process dies: events are on the store and in the work folder, MLflow knows less."""
    monkeypatch.setattr("tasks.train.EventMirror", DeadMirror)
    ranks.ends = [6]
    with pytest.raises(AttemptFailed):
        train.fn(space, run, TrainingSession())
    assert steps_in_mlflow(space, run.run_id) == []
    bring_up_to_date(space, run)
    assert steps_in_mlflow(space, run.run_id) == STEPS[:4]
    assert attempts_in_mlflow(space, run) == {1: "KILLED"}
    child = space.tracker.children(run.experiment_id, run.run_id)[0]
    assert steps_in_mlflow(space, child.run_id) == STEPS[:6], "also what was never committed"


def test_training_goes_on_while_mlflow_is_away_and_it_has_everything_later(space, run, ranks, monkeypatch):
    monkeypatch.setattr("headrace.mirror.FIRST_DELAY_SECONDS", 0.01)
    monkeypatch.setattr("tasks.train.FLUSH_SECONDS", 0.1)
    real, away = Tracker.log_points, [True]

    def log_points(self, run_id, points):
        if away[0]:
            raise TrackingUnavailable("away")
        real(self, run_id, points)

    monkeypatch.setattr(Tracker, "log_points", log_points)
    result = train.fn(space, run, TrainingSession())
    assert result.step == 12
    assert steps_in_mlflow(space, run.run_id) == []
    assert attempts_in_mlflow(space, run) in ({}, {1: "RUNNING"}), "not closed while something is missing"
    away[0] = False
    bring_up_to_date(space, run)
    assert steps_in_mlflow(space, run.run_id) == STEPS
    assert attempts_in_mlflow(space, run) == {1: "FINISHED"}


def test_every_step_is_there_once_after_many_kills(space, run, ranks):
    ranks.ends = [1, 5, 5, 8, 11, None]
    session = TrainingSession()
    for _ in range(5):
        with pytest.raises(AttemptFailed):
            train.fn(space, run, session)
    assert train.fn(space, run, session).attempts == 6
    assert steps_in_mlflow(space, run.run_id) == STEPS
    statuses = attempts_in_mlflow(space, run)
    assert list(statuses.values()).count("FINISHED") == 1
    assert "RUNNING" not in statuses.values()


def keeping(space, last):
    return resolve_run(space, make_request(checkpoint=CheckpointConfig(save_every=2, keep_last=last)), DATASET)


def commits(space, run):
    return [(c.attempt, c.step) for c in list_commits(space.storage, run.spec.run_prefix)]


def test_old_checkpoints_are_gone_when_the_attempt_has_ended(space, ranks):
    run = keeping(space, 2)
    train.fn(space, run, TrainingSession())
    assert commits(space, run) == [(1, 12), (1, 10)]


def test_by_default_the_newest_five_are_kept(space, ranks):
    run = resolve_run(space, make_request(checkpoint=CheckpointConfig(save_every=2)), DATASET)
    train.fn(space, run, TrainingSession())
    assert commits(space, run) == [(1, 12), (1, 10), (1, 8), (1, 6), (1, 4)]


def test_what_is_kept_is_an_execution_field_of_the_command_at_hand(space, ranks):
    ranks.ends = [8, None]
    run = keeping(space, 100)
    with pytest.raises(AttemptFailed):
        train.fn(space, run, TrainingSession())
    assert len(commits(space, run)) == 4
    again = keeping(space, 2)
    assert again.run_id == run.run_id
    train.fn(space, again, TrainingSession())
    assert commits(space, run) == [(2, 12), (2, 10)]
    records = read_attempts(space.storage, run.spec.run_prefix)
    assert [record.checkpoint.keep_last for record in records] == [100, 2]


def test_retention_has_ended_before_the_next_attempt_is_chosen(space, ranks, monkeypatch):
    """A failed attempt gives it no time; whatever it left undone, no thread deletes beside the next attempt."""
    alive = []
    original = ranks.__class__.__call__

    def watched(self, storage, spec, **callbacks):
        alive.append([thread.name for thread in threading.enumerate() if thread.name.startswith("retention")])
        return original(self, storage, spec, **callbacks)

    monkeypatch.setattr(type(ranks), "__call__", watched)
    ranks.ends = [6, None]
    run = keeping(space, 2)
    with pytest.raises(AttemptFailed):
        train.fn(space, run, TrainingSession())
    train.fn(space, run, TrainingSession())
    assert alive == [[f"retention {run.run_id}"]] * 2
    assert commits(space, run) == [(2, 12), (2, 10)]
