"""From where the next attempt goes on, and when enough is enough."""

import pytest

from headrace.errors import InputError, Terminal
from headrace.storage import Storage
from tests.training.checkpoint.saved import events_of
from tests.training.checkpoint.test_catalog import commit
from tests.training.toy import run_spec
from training.checkpoint.catalog import newest_at, quarantine
from training.launch import resume
from training.launch.attempts import claim_attempt, make_record, read_attempts
from training.launch.resume import attempts_without_progress, next_attempt
from training.launch.supervisor import is_finished
from training.run_spec import RestorePoint, read_attempt

RUN = run_spec(training={"steps": 100})


@pytest.fixture
def storage(tmp_path):
    return Storage.open(tmp_path / "store")


@pytest.fixture
def launch(storage, tmp_path):
    """The next attempt, and the steps that it commits."""

    def launched(*steps, run=RUN):
        spec = next_attempt(storage, run, work_root=tmp_path / "work")
        for step in steps:
            commit(storage, spec.attempt, step, run=run)
        return spec

    return launched


def test_a_run_begins_with_nothing_and_goes_on_from_its_newest_commit(storage, launch, tmp_path):
    first = launch(10, 20)
    assert (first.attempt, first.restore) == (1, None)
    assert first.work_path == tmp_path / "work" / RUN.run_id / "attempt-0001"
    assert first.work_path.is_dir()
    assert read_attempt(first.write()) == first
    second = launch()
    assert (second.attempt, second.restore) == (2, RestorePoint(attempt=1, step=20))
    third = launch(30)
    assert (third.attempt, third.restore) == (3, RestorePoint(attempt=1, step=20))
    assert launch().restore == RestorePoint(attempt=3, step=30)
    assert [record.attempt for record in read_attempts(storage, RUN.run_prefix)] == [1, 2, 3, 4]


def test_a_finished_run_has_no_next_attempt(storage, launch, tmp_path):
    launch(50)
    assert not is_finished(storage, RUN)
    launch(100)
    assert is_finished(storage, RUN)
    assert next_attempt(storage, RUN, work_root=tmp_path) is None
    assert [record.attempt for record in read_attempts(storage, RUN.run_prefix)] == [1, 2]


def test_a_finished_run_whose_end_is_damaged_trains_its_end_again(storage, launch):
    launch(50, 100)
    quarantine(storage, newest_at(storage, RUN.run_prefix, 100), reason="a bit", found_by_attempt=1)
    assert not is_finished(storage, RUN)
    spec = launch()
    assert spec.restore == RestorePoint(attempt=1, step=50)
    (event,) = events_of(spec)
    assert (event["kind"], event["attempt"]) == ("checkpoint.refused", 2)
    assert event["folder"].endswith("step-00000100/attempt-0001")
    assert "was set aside: a bit" in event["reason"]


def test_nothing_is_claimed_when_there_is_nothing_to_go_on_from(storage, launch):
    launch(50)
    quarantine(storage, newest_at(storage, RUN.run_prefix, 50), reason="a bit", found_by_attempt=1)
    with pytest.raises(Terminal, match="will not silently start from nothing"):
        launch()
    launch_other = run_spec(training={"steps": 100}, run_key="other")
    with pytest.raises(Terminal):
        launch(run=launch_other)
    assert [record.attempt for record in read_attempts(storage, RUN.run_prefix)] == [1]


def test_a_checkpoint_of_another_run_is_refused_before_anything_is_claimed(storage, launch):
    launch(50)
    with pytest.raises(InputError, match="run_key"):
        launch(run=run_spec(training={"steps": 100}, run_key="other"))
    assert [record.attempt for record in read_attempts(storage, RUN.run_prefix)] == [1]


def test_an_attempt_claimed_by_somebody_else_meanwhile_is_gone_on_from(storage, launch, monkeypatch):
    launch(10)
    real = resume.choose_restore
    rivals = [2, 3]

    def choose(storage, run, *, not_after):
        choice = real(storage, run, not_after=not_after)
        if rivals:
            # Between our choice and our claim another process launches, and commits.
            rival = rivals.pop(0)
            assert claim_attempt(storage, run.run_prefix, make_record(run, rival, choice.checkpoint.restore_point))
            commit(storage, rival, 10 * rival, run=run)
        return choice

    monkeypatch.setattr(resume, "choose_restore", choose)
    spec = launch()
    assert (spec.attempt, spec.restore) == (4, RestorePoint(attempt=3, step=30))


def test_files_of_an_older_store_do_not_leak_into_an_attempt(launch, tmp_path):
    stale = tmp_path / "work" / RUN.run_id / "attempt-0001"
    stale.mkdir(parents=True)
    (stale / "events.jsonl").write_text("old\n")
    assert list(launch().work_path.iterdir()) == []


def test_attempts_without_progress_are_counted_from_the_newest_back(storage, launch):
    assert attempts_without_progress(storage, RUN.run_prefix) == 0
    for expected in (1, 2, 3):
        launch()
        assert attempts_without_progress(storage, RUN.run_prefix) == expected
    launch(10)
    assert attempts_without_progress(storage, RUN.run_prefix) == 0
    launch()
    launch()
    assert attempts_without_progress(storage, RUN.run_prefix) == 2
    assert attempts_without_progress(storage, RUN.run_prefix, since_attempt=6) == 1


def test_setting_a_damaged_checkpoint_aside_is_progress(storage, launch):
    launch(10, 20)
    launch()
    quarantine(storage, newest_at(storage, RUN.run_prefix, 20), reason="a bit", found_by_attempt=2)
    assert attempts_without_progress(storage, RUN.run_prefix) == 0
    launch()
    assert attempts_without_progress(storage, RUN.run_prefix) == 1
