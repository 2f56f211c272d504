import pytest
import torch
from torch import nn

from training.optim.adamw import build_adamw, set_learning_rate
from training.optim.config import OptimizerConfig

CONFIG = OptimizerConfig(learning_rate=0.1, weight_decay=0.5, eps=1e-8)


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(3))]


def test_only_matrices_decay():
    matrix, vector = parameters()
    optimizer = build_adamw([matrix, vector], CONFIG)
    for parameter in (matrix, vector):
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    torch.testing.assert_close(matrix, torch.full((3, 2), 1 - 0.1 * 0.5))
    torch.testing.assert_close(vector, torch.ones(3))


def test_one_step_is_adamw_by_hand():
    (vector,) = [nn.Parameter(torch.tensor([1.0, 2.0], dtype=torch.float64))]
    optimizer = build_adamw([vector], CONFIG)
    set_learning_rate(optimizer, 0.01)
    for gradient in (0.5, -1.0):
        vector.grad = torch.tensor([gradient, 2 * gradient], dtype=torch.float64)
        optimizer.step()
    expected = []
    for start, scale in ((1.0, 1.0), (2.0, 2.0)):
        value = mean = square = 0.0
        value = start
        for step, gradient in ((1, 0.5 * scale), (2, -1.0 * scale)):
            mean = 0.9 * mean + 0.1 * gradient
            square = 0.95 * square + 0.05 * gradient**2
            value -= 0.01 * (mean / (1 - 0.9**step)) / ((square / (1 - 0.95**step)) ** 0.5 + 1e-8)
        expected.append(value)
    assert vector.tolist() == pytest.approx(expected, rel=1e-12)


def test_state_is_there_before_the_first_step():
    matrix, vector = parameters()
    optimizer = build_adamw([matrix, vector], CONFIG)
    for parameter in (matrix, vector):
        state = optimizer.state[parameter]
        assert state["step"].item() == 0.0
        assert torch.equal(state["exp_avg"], torch.zeros_like(parameter))
        assert torch.equal(state["exp_avg_sq"], torch.zeros_like(parameter))
        assert not state["exp_avg"].requires_grad


def test_learning_rate_is_set_in_every_group():
    optimizer = build_adamw(parameters(), CONFIG)
    set_learning_rate(optimizer, 0.25)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.25]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.5, 0.0]
