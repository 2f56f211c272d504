"""What counts as a bad loss."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.health.config import StabilityConfig
from training.health.stability import Verdict, judge, remembered

SPIKES = StabilityConfig(on_spike="skip", spike_window=8, spike_deviations=5.0)
FLAT = [2.0, 2.1, 1.9, 2.0, 2.2, 1.8, 2.0, 2.0]
"""Median 2.0; deviations 0, .1, .1, 0, .2, .2, 0, 0 with the median 0.05."""


@pytest.mark.parametrize("answer", ["stop", "skip", "rewind"])
@pytest.mark.parametrize(("loss", "norm"), [(math.nan, 1.0), (math.inf, 1.0), (2.0, math.nan), (2.0, math.inf)])
def test_what_is_not_finite_is_always_judged(answer, loss, norm):
    verdict = judge(StabilityConfig(on_nonfinite=answer), [], loss, norm)
    assert verdict == Verdict(answer, f"a loss of {loss} and a gradient norm of {norm}")


def test_by_default_a_loss_that_is_not_finite_stops_and_a_high_one_is_applied():
    assert judge(StabilityConfig(), FLAT, 1e9, 1.0) is None
    assert judge(StabilityConfig(), FLAT, math.nan, 1.0).answer == "stop"


def test_a_spike_lies_above_the_median_by_the_stated_number_of_deviations():
    limit = 2.0 + 5.0 * 1.4826 * 0.05
    assert judge(SPIKES, FLAT, limit - 1e-9, 1.0) is None
    verdict = judge(SPIKES, FLAT, limit + 1e-9, 1.0)
    assert verdict == Verdict("skip", "a loss of 2.371, 5 deviations above the usual 2")
    assert judge(SPIKES, FLAT, -1e9, 1.0) is None  # a low loss is none


def test_nothing_is_a_spike_before_the_window_is_full():
    assert judge(SPIKES, FLAT[1:], 1e9, 1.0) is None
    assert judge(SPIKES, FLAT, 1e9, 1.0) is not None


def test_only_the_window_counts():
    assert judge(SPIKES, [1e9] * 8 + FLAT, 3.0, 1.0) is not None
    assert remembered(SPIKES, FLAT, 7.0) == [*FLAT[1:], 7.0]
    assert remembered(StabilityConfig(), FLAT, 7.0) == []


def test_outliers_in_the_window_do_not_hide_the_next_one():
    """With mean and standard deviation the limit would be above 300."""
    assert judge(SPIKES, [*FLAT[:6], 100.0, 100.0], 90.0, 1.0) is not None


def test_equal_losses_leave_room_for_the_next_digit():
    assert judge(SPIKES, [2.0] * 8, 2.0 + 0.9 * 5 * 2e-3, 1.0) is None
    assert judge(SPIKES, [2.0] * 8, 2.0 + 1.1 * 5 * 2e-3, 1.0) is not None


@given(st.lists(st.floats(0.1, 20), min_size=8, max_size=8), st.floats(0.1, 20), st.floats(0.5, 2))
def test_the_verdict_does_not_depend_on_the_order_nor_on_the_unit(window, loss, unit):
    usual = judge(SPIKES, window, loss, 1.0) is None
    assert (judge(SPIKES, window[::-1], loss, 1.0) is None) == usual
    scaled = [value * 2.0**3 for value in window]
    assert (judge(SPIKES, scaled, loss * 2.0**3, unit) is None) == usual
