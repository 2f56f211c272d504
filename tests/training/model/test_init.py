import math

import numpy as np
import pytest
import torch

from tests.training.toy import MODEL, alone, whole
from training.model.config import ModelConfig
from training.model.init import initial_value
from training.parallel.engine import Engine
from training.parallel.world import World

CONFIG = ModelConfig(**{**MODEL, "vocab_size": 101, "tie_embeddings": False})


def initial_weights(world: World, precision: str, seed: int = 5) -> dict[str, np.ndarray]:
    return whole(Engine.build(CONFIG, world, precision=precision, seed=seed).parameters)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_initial_weights_are_bit_equal_in_any_layout(run_ranks, world_size):
    reference = initial_weights(alone(), "float32")
    for weights in run_ranks(world_size, initial_weights, "float32"):
        assert weights.keys() == reference.keys()
        assert all(np.array_equal(weights[fqn], reference[fqn]) for fqn in reference)


@pytest.mark.parametrize("precision", ["bfloat16", "float64"])
def test_initial_weights_do_not_depend_on_the_precision(precision):
    reference, weights = initial_weights(alone(), "float32"), initial_weights(alone(), precision)
    assert all(np.array_equal(weights[fqn], reference[fqn]) for fqn in reference)


def test_each_tensor_depends_on_seed_and_name_alone():
    shape = torch.Size((32, 32))
    one = initial_value("layers.0.attn.wq.weight", shape, CONFIG, 1)
    torch.manual_seed(99)
    assert torch.equal(one, initial_value("layers.0.attn.wq.weight", shape, CONFIG, 1))
    assert not torch.equal(one, initial_value("layers.1.attn.wq.weight", shape, CONFIG, 1))
    assert not torch.equal(one, initial_value("layers.0.attn.wq.weight", shape, CONFIG, 2))


def test_spread_is_smaller_where_the_residual_stream_adds_up():
    shape = torch.Size((200, 200))
    plain = initial_value("layers.0.attn.wq.weight", shape, CONFIG, 1)
    residual = initial_value("layers.0.ffn.w_down.weight", shape, CONFIG, 1)
    assert plain.std().item() == pytest.approx(0.02, rel=0.02)
    assert residual.std().item() == pytest.approx(0.02 / math.sqrt(2 * CONFIG.num_layers), rel=0.02)
    assert torch.equal(initial_value("norm.weight", torch.Size((32,)), CONFIG, 1), torch.ones(32))
