"""Requests to go back, and what the next attempts make of them."""

import pytest

from headrace.errors import DamagedData
from headrace.storage import Storage
from tests.training.checkpoint.test_catalog import commit
from tests.training.toy import run_spec
from training.health.rewind import RewindRequest, SkipRange, read_rewind, rewind_key, write_rewind
from training.launch.attempts import read_attempts, rewound_to
from training.launch.resume import attempts_without_progress, next_attempt
from training.run_spec import RestorePoint

RUN = run_spec(training={"steps": 100})
FIRST, SECOND = SkipRange(start=200, stop=264), SkipRange(start=400, stop=408)


@pytest.fixture
def storage(tmp_path):
    return Storage.open(tmp_path / "store")


@pytest.fixture
def launch(storage, tmp_path):
    """The next attempt, and the steps that it commits."""

    def launched(*steps):
        spec = next_attempt(storage, RUN, work_root=tmp_path / "work")
        for step in steps:
            commit(storage, spec.attempt, step, run=RUN)
        return spec

    return launched


def ask(storage, attempt, skip, last_good_step):
    request = RewindRequest(
        format_version=1, attempt=attempt, step=34, reason="a spike", last_good_step=last_good_step, skip=skip
    )
    write_rewind(storage, RUN.run_prefix, request)
    return request


def test_the_next_attempt_starts_before_and_passes_over(storage, launch):
    launch(10, 20, 30)
    request = ask(storage, 1, FIRST, last_good_step=25)
    assert read_rewind(storage, RUN.run_prefix, 1) == request
    again = launch()
    assert (again.restore, again.skip) == (RestorePoint(attempt=1, step=20), (FIRST,))


def test_it_starts_from_the_initial_weights_when_nothing_was_saved_before(storage, launch):
    launch(30)
    ask(storage, 1, FIRST, last_good_step=25)
    assert launch().restore is None


def test_every_later_attempt_passes_over_the_same(storage, launch):
    launch(10, 20, 30)
    ask(storage, 1, FIRST, last_good_step=25)
    launch()  # dies before it commits: its commits, and not those of 30, are what there is
    assert (launch(40).restore, launch().skip) == (RestorePoint(attempt=1, step=20), (FIRST,))
    ask(storage, 4, SECOND, last_good_step=45)
    last = launch()
    assert (last.restore, last.skip) == (RestorePoint(attempt=3, step=40), (FIRST, SECOND))
    assert rewound_to(read_attempts(storage, RUN.run_prefix)) == 20


def test_a_run_that_never_went_back_has_not_been_rewound(storage, launch):
    launch(10)
    launch(20)
    assert rewound_to(read_attempts(storage, RUN.run_prefix)) is None
    assert rewound_to([]) is None


def test_a_request_of_an_attempt_that_was_fenced_off_meanwhile_is_read_by_nobody(storage, launch):
    launch(10, 20, 30)
    launch()
    ask(storage, 1, FIRST, last_good_step=5)
    again = launch()
    assert (again.restore, again.skip) == (RestorePoint(attempt=1, step=30), ())


def test_the_first_request_of_an_attempt_stands(storage):
    first = ask(storage, 1, FIRST, last_good_step=25)
    ask(storage, 1, SECOND, last_good_step=5)
    assert read_rewind(storage, RUN.run_prefix, 1) == first


def test_going_back_is_progress(storage, launch):
    launch()
    launch()
    assert attempts_without_progress(storage, RUN.run_prefix) == 2
    ask(storage, 2, FIRST, last_good_step=0)
    assert attempts_without_progress(storage, RUN.run_prefix) == 0


def test_a_request_that_is_none_is_refused(storage, launch):
    launch()
    storage.write_bytes(rewind_key(RUN.run_prefix, 1), b'{"attempt": "first"}')
    with pytest.raises(DamagedData, match=r"rewinds/0001\.json is not a rewind of this version"):
        launch()


def test_what_a_range_reaches():
    assert [position for position in range(195, 270, 1) if FIRST.reaches(position)] == list(range(200, 264))
