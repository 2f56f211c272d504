"""The account of a run's time."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.health.goodput import BUCKETS, account
from training.launch.attempts import AttemptRecord
from training.run_spec import RestorePoint


def record(attempt, time, restore=None):
    return AttemptRecord(
        format_version=1,
        attempt=attempt,
        restore=RestorePoint(attempt=restore[0], step=restore[1]) if restore else None,
        host="here",
        pid=1,
        code_digest="c",
        versions={},
        layout={"world_size": 2},
        time=time,
    )


def step(time, number, seconds=1.0, data=0.1):
    return {"kind": "step", "time": time, "step": number, "step_seconds": seconds, "data_seconds": data}


def told(time, kind, **fields):
    return {"kind": kind, "time": time, **fields}


def ended(time, outcome):
    return told(time, "attempt.ended", outcome=outcome)


FIRST = [
    told(105.0, "attempt.started", step=0),
    told(112.0, "evaluation", step=0, seconds=2.0),
    step(113.0, 1),
    step(114.0, 2),
    told(114.25, "save.staged", step=2, blocking_seconds=0.25),
    step(115.25, 3),
    told(115.5, "save.committed", step=2, seconds=1.5),
    step(116.25, 4),
    ended(120.0, "failed"),
]
SECOND = [
    step(141.0, 3),
    step(142.5, 4),  # half a second for which nobody says what it was
    told(142.75, "save.staged", step=4, blocking_seconds=0.25),
    told(144.0, "save.committed", step=4, seconds=1.5),
    told(144.5, "finished", step=4, tokens_seen=1, save_seconds=1.75),
    ended(145.0, "finished"),
]
ATTEMPTS = [record(1, 100.0), record(2, 130.0, (1, 2))]


def test_every_second_of_a_run_is_in_one_bucket():
    goodput = account(ATTEMPTS, {1: FIRST, 2: SECOND})
    assert goodput.seconds == pytest.approx(
        {
            "productive": 4 * 0.9,  # steps 1 and 2 of the first attempt, 3 and 4 of the second
            "replayed": 2.0,  # steps 3 and 4 of the first
            "save_stall": 0.25 + 0.25 + 1.75,
            "data_wait": 4 * 0.1,
            "start_up": 10.0 + 10.0,
            "evaluation": 2.0,
            "queue": 10.0,
            "dead": (120.0 - 116.25) + (145.0 - 144.5),
            "unattributed": 0.5,
        }
    )
    assert goodput.wall_seconds == pytest.approx(45.0)
    assert goodput.device_seconds == pytest.approx(2 * (20.0 + 15.0))
    assert goodput.failures == 1
    assert goodput.productive_share == pytest.approx(3.6 / 45)


def test_the_interval_between_saves_is_that_of_young_and_daly():
    advice = account(ATTEMPTS, {1: FIRST, 2: SECOND}).advice
    assert (advice.save_seconds, advice.step_seconds, advice.durable_seconds) == (0.25, 1.0, 1.5)
    assert advice.between_failures_seconds == pytest.approx(35.0)
    assert advice.seconds == pytest.approx(math.sqrt(2 * 0.25 * 35.0))
    assert advice.steps == 4


def test_no_interval_is_advised_that_would_only_skip_saves():
    slow = [event | {"seconds": 30.0} if event["kind"] == "save.committed" else event for event in FIRST + SECOND]
    assert account([record(1, 100.0)], {1: slow}).advice.steps == 30


def test_nothing_is_advised_from_nothing():
    goodput = account(ATTEMPTS, {1: FIRST[:4], 2: []})
    assert goodput.advice is None
    assert goodput.why_no_advice == (
        "no interval between saves is advised before two steps and two committed saves beside the last were seen: "
        "2 and 0 so far"
    )
    assert account(ATTEMPTS, {1: FIRST, 2: SECOND}).why_no_advice is None


def test_steps_that_a_rewind_passes_by_are_replayed():
    attempts = [record(1, 100.0), record(2, 130.0)]
    assert account(attempts, {1: FIRST, 2: SECOND}).seconds["replayed"] == pytest.approx(4.0)


def test_an_attempt_that_never_worked_was_starting_or_dead():
    assert account([record(1, 100.0)], {1: [told(105.0, "attempt.started")]}).seconds["start_up"] == 5.0
    assert account([record(1, 100.0)], {1: [ended(105.0, "failed")]}).seconds["dead"] == 5.0


def test_a_run_without_attempts_has_no_account():
    goodput = account([], {})
    assert (goodput.wall_seconds, goodput.productive_share, goodput.advice) == (0.0, 0.0, None)


def test_an_attempt_that_runs_has_not_failed_and_one_that_a_newer_one_replaced_has():
    running = FIRST[:-1]
    assert account(ATTEMPTS[:1], {1: running}).failures == 0
    assert account(ATTEMPTS, {1: running, 2: SECOND}).failures == 1


moments = st.floats(0, 1000, allow_nan=False)
kinds = st.sampled_from(
    [
        lambda time, size: step(time, 1, size, size / 2),
        lambda time, size: told(time, "evaluation", step=1, seconds=size),
        lambda time, size: told(time, "save.staged", step=1, blocking_seconds=size),
        lambda time, size: told(time, "save.committed", step=1, seconds=size),
        lambda time, size: ended(time, "failed"),
    ]
)


@given(st.lists(st.tuples(moments, st.floats(0, 50), kinds), max_size=12), st.floats(-100, 1000))
def test_the_buckets_make_the_wall_whatever_the_clocks_did(events, claimed):
    """Also with clocks that were set back, or that differ between the launcher and the ranks."""
    log = [make(time, size) for time, size, make in events]
    goodput = account([record(1, claimed)], {1: log})
    end = max([claimed, *(event["time"] for event in log)])
    assert list(goodput.seconds) == list(BUCKETS)
    assert all(value >= 0 for value in goodput.seconds.values())
    assert goodput.wall_seconds == pytest.approx(end - claimed, abs=1e-6)
