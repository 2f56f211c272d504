import sys

import pytest
import torch

from training.parallel.world import World


def sum_of_ranks(world: World, offset: int) -> list[float]:
    values = torch.tensor([float(world.rank + offset), 1.0], dtype=torch.float64)
    return world.sum(values).tolist()


def imported(world: World) -> list[str]:
    return [name for name in ("prefect", "mlflow", "s3fs") if name in sys.modules]


def fails_on_rank_one(world: World) -> None:
    if world.rank == 1:
        raise ValueError("rank one is unhappy")
    world.barrier()


def test_sum_adds_over_all_ranks(run_ranks):
    assert run_ranks(3, sum_of_ranks, 10) == [[33.0, 3.0]] * 3


def test_one_rank_alone_has_no_mesh(run_ranks):
    assert run_ranks(1, sum_of_ranks, 7) == [[7.0, 1.0]]


def test_ranks_are_forked_from_a_parent_without_orchestration(run_ranks):
    assert run_ranks(2, imported) == [[], []]


def test_the_failing_rank_is_named_with_its_traceback(run_ranks):
    with pytest.raises(AssertionError, match=r"rank 1 of 2 left with 1[\s\S]*rank one is unhappy"):
        run_ranks(2, fails_on_rank_one)
