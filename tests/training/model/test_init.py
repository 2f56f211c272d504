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


def spread(fqn: str, *shape: int, config: ModelConfig = CONFIG) -> float:
    return initial_value(fqn, torch.Size(shape), config, 1).std().item()


def test_outputs_have_the_variance_of_their_inputs():
    assert spread("layers.0.attn.wq.weight", 200, 100) == pytest.approx(0.1, rel=0.02)
    assert spread("layers.0.ffn.w_gate.weight", 100, 400) == pytest.approx(0.05, rel=0.02)
    assert spread("output.weight", 300, 100) == pytest.approx(0.1, rel=0.02)


def test_what_adds_to_the_residual_stream_is_smaller_by_the_root_of_its_number():
    assert spread("layers.0.attn.wo.weight", 200, 100) == pytest.approx(0.1 / math.sqrt(2 * 2), rel=0.02)
    assert spread("layers.1.ffn.w_down.weight", 200, 400) == pytest.approx(0.05 / math.sqrt(2 * 2), rel=0.02)


def test_an_embedding_has_unit_rows_unless_it_is_the_output_too():
    tied = ModelConfig(**{**MODEL, "tie_embeddings": True})
    assert spread("embed.weight", 400, 100) == pytest.approx(1.0, rel=0.02)
    assert spread("embed.weight", 400, 100, config=tied) == pytest.approx(0.1, rel=0.02)


def test_norms_begin_as_ones():
    assert torch.equal(initial_value("norm.weight", torch.Size((32,)), CONFIG, 1), torch.ones(32))
