import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep.order import SampleOrder


def epoch(order: SampleOrder, number: int) -> np.ndarray:
    n = order.num_samples
    return order.indices(np.arange(number * n, (number + 1) * n))


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 3000), st.integers(0, 2**63), st.integers(0, 50))
def test_each_epoch_takes_every_sample_exactly_once(num_samples, seed, number):
    taken = epoch(SampleOrder("plan", seed, num_samples), number)
    assert np.array_equal(np.sort(taken), np.arange(num_samples))


@pytest.mark.parametrize("num_samples", [1, 2, 3, 4, 5, 7, 8, 9, 63, 64, 65, 1023, 1024, 1025, 65537])
def test_sizes_around_powers_of_two(num_samples):
    taken = epoch(SampleOrder("plan", 7, num_samples), 1)
    assert np.array_equal(np.sort(taken), np.arange(num_samples))


def test_another_epoch_seed_or_plan_is_another_order():
    first = epoch(SampleOrder("plan", 1, 1000), 0)
    for other in (
        epoch(SampleOrder("plan", 1, 1000), 1),
        epoch(SampleOrder("plan", 2, 1000), 0),
        epoch(SampleOrder("other", 1, 1000), 0),
    ):
        # two independent permutations of 1,000 agree at one position on average
        assert np.count_nonzero(first == other) < 10


def test_the_answer_for_a_position_does_not_depend_on_what_else_is_asked():
    order = SampleOrder("plan", 3, 777)
    everything = order.indices(np.arange(5 * 777))
    assert np.array_equal(order.indices(np.array([3000, 5, 776, 777, 3884])), everything[[3000, 5, 776, 777, 3884]])
    assert np.array_equal(order.indices(np.arange(12).reshape(3, 4)), everything[:12].reshape(3, 4))
    assert order.indices(np.array([], dtype=np.int64)).shape == (0,)


def test_the_order_is_spread_out():
    # Neighbours in the order lie a third of the range apart on average if the order is random.
    taken = epoch(SampleOrder("plan", 11, 100_000), 0)
    assert abs(np.abs(np.diff(taken)).mean() / 100_000 - 1 / 3) < 0.01
    halves = [np.count_nonzero(part < 50_000) for part in np.split(taken, 100)]
    assert 400 < min(halves) < max(halves) < 600


def test_a_trillion_samples_need_no_memory():
    order = SampleOrder("plan", 5, 10**12)
    taken = order.indices(np.array([0, 1, 10**12 - 1, 10**12, 7 * 10**12 + 3]))
    assert taken.min() >= 0
    assert taken.max() < 10**12
    assert len(set(taken.tolist())) == 5


def test_golden_values():
    # A change here changes which samples every existing run would see after a restart.
    assert SampleOrder("a" * 64, 0, 10).indices(np.arange(20)).tolist() == GOLDEN_TEN
    positions = np.array([0, 1, 2, 1_000_002, 1_000_003])
    assert SampleOrder("b" * 64, 42, 1_000_003).indices(positions).tolist() == GOLDEN_MILLION


GOLDEN_TEN = [0, 6, 9, 7, 8, 2, 5, 3, 4, 1, 1, 4, 7, 0, 3, 8, 2, 5, 9, 6]
GOLDEN_MILLION = [151530, 306989, 541034, 910578, 235015]


def test_refuses_what_cannot_be():
    with pytest.raises(ValueError, match="at least one sample, got num_samples=0"):
        SampleOrder("plan", 0, 0)
    with pytest.raises(ValueError, match="positions count from 0, got -1"):
        SampleOrder("plan", 0, 5).indices(np.array([3, -1]))
