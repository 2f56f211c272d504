"""Every layout computes the same thing: in float64, what differs is the order of additions alone."""

from typing import Any

import numpy as np
import pytest

from tests.training.toy import alone, run_spec, run_toy

TOLERANCE = 1e-10


def largest_difference(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Over the loss and the gradient norm of every step and all final weights."""
    assert one["weights"].keys() == other["weights"].keys()
    assert len(one["steps"]) == len(other["steps"]) > 0
    steps = [
        abs(a[name] - b[name])
        for a, b in zip(one["steps"], other["steps"], strict=True)
        for name in ("loss", "grad_norm", "learning_rate", "tokens_seen")
    ]
    weights = [np.abs(one["weights"][fqn] - other["weights"][fqn]).max() for fqn in one["weights"]]
    return float(max(*steps, *weights))


@pytest.mark.parametrize("tie_embeddings", [True, False])
@pytest.mark.parametrize("world_size", [2, 4])
def test_sharded_ranks_equal_one_process(run_ranks, world_size, tie_embeddings):
    run = run_spec(model={"tie_embeddings": tie_embeddings})
    reference = run_toy(alone(), run)
    for result in run_ranks(world_size, run_toy, run):
        assert largest_difference(reference, result) < TOLERANCE


@pytest.mark.parametrize(("world_size", "micro_batch_size"), [(1, 1), (1, 3), (2, 1), (2, 2), (4, 1)])
def test_accumulation_changes_nothing(run_ranks, world_size, micro_batch_size):
    reference = run_toy(alone(), run_spec(), True)
    split = run_spec(layout={"micro_batch_size": micro_batch_size})
    for result in run_ranks(world_size, run_toy, split, True):
        assert largest_difference(reference, result) < TOLERANCE


def test_uneven_targets_are_counted_by_token_not_by_rank(run_ranks):
    run = run_spec()
    reference = run_toy(alone(), run, True)
    assert [step["tokens_seen"] for step in reference["steps"]] != [128, 256, 384]
    for result in run_ranks(2, run_toy, run, True):
        assert largest_difference(reference, result) < TOLERANCE


def test_odd_vocabulary_divides_over_ranks(run_ranks):
    run = run_spec(model={"vocab_size": 101})
    reference = run_toy(alone(), run)
    for result in run_ranks(4, run_toy, run):
        assert largest_difference(reference, result) < TOLERANCE


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_same_layout_repeats_bit_for_bit(run_ranks, precision):
    run = run_spec(training={"precision": precision})
    first, second = (run_ranks(2, run_toy, run)[0] for _ in range(2))
    assert largest_difference(first, second) == 0.0


def test_float32_is_near_float64(run_ranks):
    reference = run_toy(alone(), run_spec())
    result = run_ranks(2, run_toy, run_spec(training={"precision": "float32"}))[0]
    assert 0.0 < largest_difference(reference, result) < 1e-3


def test_bfloat16_computes_in_bfloat16_on_float32_weights(run_ranks):
    reference = run_toy(alone(), run_spec())
    for world_size in (1, 2):
        result = run_ranks(world_size, run_toy, run_spec(training={"precision": "bfloat16"}))[0]
        losses = [step["loss"] for step in result["steps"]]
        assert losses == pytest.approx([step["loss"] for step in reference["steps"]], abs=0.03)
        assert losses != pytest.approx([step["loss"] for step in reference["steps"]], abs=1e-6)
