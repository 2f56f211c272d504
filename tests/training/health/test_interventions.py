"""The loop meets bad batches: what it applies, what it passes over, and what a resumed or rewound run becomes."""

import math
from typing import Any

import pytest
import torch

from headrace.errors import Terminal
from tests.training.toy import MemorySink, Notebook, alone, run_spec, toy_training, whole
from training.health.rewind import Rewind, RewindRequest, SkipRange
from training.loop import Training, train
from training.parallel.world import World
from training.run_spec import RestorePoint

BATCH = 8
STEPS = {"steps": 12}


def toy(world: World, stability: dict[str, Any], bad: dict[int, float], **changes: Any) -> Training:
    """A training that meets bad batches: the loss of the batch at a position is multiplied by `bad[position]`."""
    run = run_spec(training=STEPS, stability=stability, checkpoint={"save_every": 2})
    training = toy_training(world, run)
    forward_backward = training.engine.forward_backward

    def poisoned(*args: Any) -> torch.Tensor:
        return forward_backward(*args) * bad.get(training.state.position, 1.0)

    training.engine.forward_backward = poisoned  # type: ignore[method-assign]
    return Training(**{**vars(training), **changes})


def told(training: Training, kind: str) -> list[dict[str, Any]]:
    assert isinstance(training.sink, MemorySink)
    return [{key: value for key, value in event.items() if key != "kind"} for event in training.sink.of_kind(kind)]


def weights(training: Training) -> dict[str, Any]:
    return whole(training.engine.parameters)


def equal(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all((a[name] == b[name]).all() for name in a)


def reference(world: World, *skip: SkipRange) -> Training:
    """A run that passes over these from the start and meets nothing bad."""
    training = toy(world, {}, {}, skip=skip)
    assert train(training) == "finished"
    return training


def skips_a_bad_batch(world: World) -> tuple[Any, ...]:
    training = toy(world, {"on_nonfinite": "skip"}, {4 * BATCH: math.nan if world.rank == 1 or world.dp == 1 else 1.0})
    assert train(training) == "finished"
    same = equal(weights(training), weights(reference(world, SkipRange(start=32, stop=40))))
    return same, told(training, "batch.skipped"), training.state.skipped, training.state.position, training.state.step


def test_a_batch_that_is_not_finite_is_passed_over(run_ranks):
    """On every rank, though only one of them saw the bad number; as if it had never been in the order."""
    for outcome in (*run_ranks(2, skips_a_bad_batch), skips_a_bad_batch(alone())):
        same, skipped, ranges, position, step = outcome
        assert same
        assert [event | {"reason": event["reason"][:13]} for event in skipped] == [
            {"step": 5, "position": 32, "reason": "a loss of nan", "seconds": skipped[0]["seconds"]}
        ]
        assert (ranges, position, step) == ([(32, 40)], 13 * BATCH, 12)


def test_each_step_is_told_once_and_none_is_missing():
    training = toy(alone(), {"on_nonfinite": "skip"}, {0: math.inf, 4 * BATCH: math.nan, 5 * BATCH: math.nan})
    train(training)
    assert [event["step"] for event in told(training, "step")] == list(range(1, 13))
    assert training.state.tokens_seen == 12 * BATCH * 16  # what was applied
    assert training.state.skipped == [(0, 8), (32, 40), (40, 48)]


def test_a_resumed_run_judges_and_passes_over_as_the_unbroken_one():
    """The losses that say what is usual are part of the state: resumed at each step, also right after a skip."""
    stability = {"on_spike": "skip", "spike_window": 8, "spike_deviations": 30.0}
    bad = {9 * BATCH: 100.0}
    unbroken = toy(alone(), stability, bad)
    train(unbroken)
    assert [event["position"] for event in told(unbroken, "batch.skipped")] == [72]
    assert isinstance(unbroken.checkpoints, Notebook)
    for step in (2, 8, 10):
        resumed = toy(alone(), stability, bad, checkpoints=unbroken.checkpoints)
        resumed.checkpoints.load(resumed.state, RestorePoint(attempt=1, step=step))
        train(resumed)
        assert equal(weights(resumed), weights(unbroken)), step
        assert resumed.state.values() == unbroken.state.values()


def rewinds(world: World) -> tuple[Any, ...]:
    requests: list[RewindRequest] = []
    stability = {"on_nonfinite": "rewind", "rewind_batches": 3}
    bad = {7 * BATCH: math.nan}
    first = toy(world, stability, bad, ask_rewind=requests.append)
    with pytest.raises(Rewind) as error:
        train(first)
    # Only the rank that writes asked; here the others are told by hand what they will read in their attempt's file.
    skip = SkipRange(start=40, stop=64)
    again = toy(world, stability, bad, checkpoints=first.checkpoints, skip=(skip,), attempt=2)
    again.checkpoints.load(again.state, RestorePoint(attempt=1, step=4))
    assert train(again) == "finished"
    same = equal(weights(again), weights(reference(world, skip)))
    return same, requests, str(error.value), told(again, "range.skipped"), again.state.skipped


def test_a_rewound_run_is_the_run_that_never_had_these_batches(run_ranks):
    both = run_ranks(2, rewinds)
    for same, _, message, passed, ranges in (*both, rewinds(alone())):
        assert same
        assert message == (
            "Step 8 gave a loss of nan and a gradient norm of "
            + message.split("norm of ")[1].split(":")[0]
            + ": the run goes back to step 5 or before and passes over the sequences 40 to 63 of the sample order."
        )
        assert passed == [{"step": 5, "start": 40, "stop": 64}]
        assert ranges == [(40, 64)]
    (request,) = both[0][1]
    assert (request.attempt, request.step, request.last_good_step) == (1, 8, 5)
    assert request.skip == SkipRange(start=40, stop=64)
    assert both[1][1] == []


def test_a_rewind_at_the_beginning_goes_back_to_the_beginning():
    requests: list[RewindRequest] = []
    stability = {"on_nonfinite": "rewind", "rewind_batches": 9}
    training = toy(alone(), stability, {BATCH: math.nan}, ask_rewind=requests.append)
    with pytest.raises(Rewind):
        train(training)
    assert (requests[0].last_good_step, requests[0].skip) == (0, SkipRange(start=0, stop=16))


@pytest.mark.parametrize("answer", ["skip", "rewind"])
def test_interventions_are_counted_over_the_whole_run_and_end_it(answer):
    """One was made in the loop, one by a rewind whose range is still ahead: the third is too many."""
    stability = {"on_nonfinite": answer, "max_interventions": 2}
    training = toy(alone(), stability, {5 * BATCH: math.nan}, skip=(SkipRange(start=72, stop=80),))
    training.state.skipped = [(0, 8)]
    with pytest.raises(Terminal) as error:
        train(training)
    assert "2 batches were passed over or gone back for already (stability.max_interventions)" in str(error.value)
    assert training.state.step == 5


def test_a_stop_leaves_the_state_of_the_step_before():
    training = toy(alone(), {}, {2 * BATCH: math.nan})
    with pytest.raises(Terminal, match="Step 3 gave a loss of nan"):
        train(training)
    assert training.state.step == 2
    assert isinstance(training.checkpoints, Notebook)
    assert training.checkpoints.calls == [("save", 2)]
