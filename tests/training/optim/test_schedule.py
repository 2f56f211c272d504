import math

import pytest

from training.optim.config import ScheduleConfig
from training.optim.schedule import Schedule

SCHEDULE = Schedule.of(ScheduleConfig(warmup_steps=4, final_fraction=0.1), peak=2.0, steps=12)


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (1, 0.5),
        (2, 1.0),
        (4, 2.0),
        (6, 2.0 * (0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2)),
        (8, 2.0 * (0.1 + 0.9 / 2)),
        (12, 0.2),
        (13, 0.2),
    ],
)
def test_learning_rate_of_each_step(step, expected):
    assert SCHEDULE.learning_rate(step) == pytest.approx(expected, rel=1e-15)


def test_it_never_rises_after_the_warmup():
    rates = [SCHEDULE.learning_rate(step) for step in range(4, 13)]
    assert rates == sorted(rates, reverse=True)


def test_without_warmup_the_first_step_is_already_on_the_cosine():
    schedule = Schedule.of(ScheduleConfig(warmup_steps=0, final_fraction=0.0), peak=1.0, steps=2)
    assert [schedule.learning_rate(step) for step in (1, 2)] == [pytest.approx(0.5), pytest.approx(0.0, abs=1e-16)]


def test_warmup_as_long_as_the_run_ends_at_the_peak():
    schedule = Schedule.of(ScheduleConfig(warmup_steps=3), peak=3.0, steps=3)
    assert [schedule.learning_rate(step) for step in (1, 2, 3)] == [1.0, 2.0, 3.0]


def test_values_name_everything_that_shapes_it():
    assert SCHEDULE.values() == {
        "kind": "cosine",
        "peak": 2.0,
        "steps": 12,
        "warmup_steps": 4,
        "final_fraction": 0.1,
    }
