import random
from typing import Any

import numpy as np
import pytest
import torch

from headrace.errors import DamagedData
from tests.training.toy import MemorySink, Notebook, alone, run_spec, toy_training, whole
from training.loop import Training, train
from training.optim.schedule import Schedule
from training.parallel.world import World
from training.rng import capture_random_state, restore_random_state, seed_rank
from training.run_spec import RestorePoint
from training.state import MOMENTS, TrainState


def draw() -> list[float]:
    return [torch.rand(1).item(), random.random(), float(np.random.random()), random.gauss(0, 1), np.random.normal()]


def test_random_state_of_every_generator_comes_back():
    seed_rank(1, 0)
    draw()  # leaves the second half of a pair of normal numbers in the generators that keep one
    state = capture_random_state()
    assert state.dtype == torch.uint8
    expected = draw()
    draw()
    restore_random_state(state)
    assert draw() == expected


def test_each_rank_has_its_own_random_state():
    drawn = []
    for seed, rank in ((1, 0), (1, 1), (2, 0), (1, 0)):
        seed_rank(seed, rank)
        drawn.append(draw())
    assert drawn[0] == drawn[3]
    assert len({tuple(values) for values in drawn}) == 3


def test_capturing_draws_nothing():
    seed_rank(1, 0)
    expected = draw()
    seed_rank(1, 0)
    capture_random_state()
    assert draw() == expected


def test_tensors_have_the_names_of_the_checkpoint_format():
    state = toy_training(alone(), run_spec()).state
    names = set(state.tensors())
    fqns = set(state.parameters)
    assert names == (
        {f"model.{fqn}" for fqn in fqns}
        | {f"optim.{fqn}.{moment}" for fqn in fqns for moment in MOMENTS}
        | {"rng.rank0000"}
    )


def test_tensors_are_the_state_itself():
    state = toy_training(alone(), run_spec()).state
    state.tensors()["model.norm.weight"].fill_(7.0)
    assert state.parameters["norm.weight"].eq(7.0).all()


def test_values_hold_the_rest_as_json():
    state = toy_training(alone(), run_spec()).state
    state.advance(sequences=8, tokens=100)
    state.advance(sequences=8, tokens=90)
    assert state.values() == {
        "step": 2,
        "tokens_seen": 190,
        "position": 16,
        "skipped": [],
        "recent_losses": [],
        "schedule": {"kind": "cosine", "peak": 0.01, "steps": 3, "warmup_steps": 2, "final_fraction": 0.1},
    }


def test_another_schedule_is_refused():
    state = toy_training(alone(), run_spec()).state
    saved = state.state_dict()
    state.schedule = Schedule(peak=0.01, steps=6, warmup_steps=2, final_fraction=0.1)
    with pytest.raises(
        DamagedData, match=r"step 0 follows the learning-rate schedule .*: 3.*but this run follows .*: 6"
    ):
        state.load_state_dict(saved)


def test_a_missing_random_state_leaves_the_own_one():
    """A checkpoint of fewer ranks has none for this rank."""
    state = toy_training(alone(), run_spec()).state
    saved = state.state_dict()
    del saved["tensors"]["rng.rank0000"]
    seed_rank(3, 0)
    expected = draw()
    seed_rank(3, 0)
    state.load_state_dict(saved)
    assert draw() == expected


def straight_and_resumed(world: World, precision: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Four steps at once, and four steps cut in two by a restart from what was saved at step 2."""
    run = run_spec(training={"steps": 4, "precision": precision}, checkpoint={"save_every": 2})
    straight = toy_training(world, run)
    train(straight)
    assert isinstance(straight.checkpoints, Notebook)
    resumed = toy_training(world, run)
    resumed.checkpoints.saved = straight.checkpoints.saved
    resumed.checkpoints.load(resumed.state, RestorePoint(attempt=1, step=2))
    assert resumed.state.step == 2
    train(resumed)
    return story(straight), story(resumed)


def story(training: Training) -> dict[str, Any]:
    assert isinstance(training.sink, MemorySink)
    timeless = ("step", "loss", "grad_norm", "learning_rate", "tokens_seen")
    steps = [{name: event[name] for name in timeless} for event in training.sink.of_kind("step")]
    return {"steps": steps[-2:], "weights": whole(training.state.tensors()), "values": training.state.values()}


@pytest.mark.parametrize(("world_size", "precision"), [(1, "float32"), (2, "float32"), (2, "bfloat16")])
def test_a_resumed_run_is_the_straight_run_bit_for_bit(run_ranks, world_size, precision):
    for straight, resumed in run_ranks(world_size, straight_and_resumed, precision):
        assert resumed["steps"] == straight["steps"]
        assert resumed["values"] == straight["values"]
        for name, tensor in straight["weights"].items():
            assert np.array_equal(tensor, resumed["weights"][name]), name


def test_state_is_a_plain_dataclass_of_named_parts():
    assert list(TrainState.__dataclass_fields__) == [
        "parameters",
        "optimizer",
        "schedule",
        "rank",
        "step",
        "tokens_seen",
        "position",
        "skipped",
        "recent_losses",
    ]
