import math

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

from training.optim.clip import clip_gradients
from training.parallel.world import World

GRADIENTS = [torch.arange(6.0, dtype=torch.float64).view(3, 2), torch.tensor([3.0, -4.0, 1.0], dtype=torch.float64)]
NORM = math.sqrt(0 + 1 + 4 + 9 + 16 + 25 + 9 + 16 + 1)


def with_gradients(gradients: list[torch.Tensor]) -> list[nn.Parameter]:
    parameters = [nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    return parameters


def test_gradients_are_scaled_by_one_factor_over_all_parameters():
    parameters = with_gradients(GRADIENTS)
    assert clip_gradients(parameters, 2.0).item() == pytest.approx(NORM, rel=1e-14)
    for parameter, gradient in zip(parameters, GRADIENTS, strict=True):
        torch.testing.assert_close(parameter.grad, gradient * 2.0 / NORM, rtol=1e-5, atol=0)
    assert torch.cat([p.grad.flatten() for p in parameters]).norm().item() == pytest.approx(2.0, rel=1e-5)


def test_a_norm_below_the_limit_changes_nothing():
    parameters = with_gradients(GRADIENTS)
    clip_gradients(parameters, 100.0)
    assert all(torch.equal(p.grad, gradient) for p, gradient in zip(parameters, GRADIENTS, strict=True))


def test_a_parameter_without_gradient_is_left_out():
    parameters = [*with_gradients(GRADIENTS), nn.Parameter(torch.ones(2))]
    assert clip_gradients(parameters, 1.0).item() == pytest.approx(NORM)


def clip_shards(world: World, max_norm: float) -> tuple[float, list[list[float]]]:
    parameters = [
        nn.Parameter(distribute_tensor(torch.zeros_like(gradient), world.mesh, [Shard(0)])) for gradient in GRADIENTS
    ]
    for parameter, gradient in zip(parameters, GRADIENTS, strict=True):
        parameter.grad = distribute_tensor(gradient, world.mesh, [Shard(0)], src_data_rank=None)
    norm = clip_gradients(parameters, max_norm)
    return norm.item(), [p.grad.full_tensor().flatten().tolist() for p in parameters]


@pytest.mark.parametrize("world_size", [2, 4])
def test_shards_have_the_norm_of_the_whole(run_ranks, world_size):
    expected = [(gradient * 2.0 / (NORM + 1e-6)).flatten().tolist() for gradient in GRADIENTS]
    for norm, clipped in run_ranks(world_size, clip_shards, 2.0):
        assert norm == pytest.approx(NORM, rel=1e-14)
        assert clipped[0] == pytest.approx(expected[0], rel=1e-12)
        assert clipped[1] == pytest.approx(expected[1], rel=1e-12)
