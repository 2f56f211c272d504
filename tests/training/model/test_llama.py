"""The decoder is Llama's: the same logits as the implementation that readers of an export use."""

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from tests.training.toy import MODEL
from training.export.hf import to_hf_name
from training.model.config import ModelConfig
from training.model.init import initialise
from training.model.llama import Decoder, rotary_table
from training.model.loss import IGNORED, token_loss_sum, token_losses


def decoder(**changes) -> Decoder:
    config = ModelConfig(**{**MODEL, **changes})
    model = Decoder(config)
    initialise(model, config, seed=3)
    with torch.no_grad():
        for parameter in model.parameters():
            # far from the initial values, where a wrong norm or angle would hardly show
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.2)
    return model


def theirs(model: Decoder) -> LlamaForCausalLM:
    config = model.config
    llama = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.dim,
            intermediate_size=config.ffn_dim,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            max_position_embeddings=config.max_seq_len,
            rms_norm_eps=config.norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            tie_word_embeddings=config.tie_embeddings,
            attn_implementation="sdpa",
        )
    )
    weights = {to_hf_name(name): tensor for name, tensor in model.state_dict().items()}
    llama.load_state_dict(weights, strict=not config.tie_embeddings)
    llama.tie_weights()
    return llama.eval()


def tokens(length: int, vocab_size: int = 67) -> Tensor:
    return torch.randint(0, vocab_size, (3, length), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_embeddings": False},
        {"num_kv_heads": 1},
        {"num_kv_heads": 4},
        {"rope_theta": 500_000.0, "max_seq_len": 300},
        {"norm_eps": 1e-2},
    ],
    ids=str,
)
def test_logits_equal_transformers(changes):
    model = decoder(**changes)
    ids = tokens(model.config.max_seq_len)
    with torch.no_grad():
        ours, reference = model(ids), theirs(model)(ids).logits
    assert reference.std() > 1.0
    torch.testing.assert_close(ours, reference, rtol=1e-5, atol=2e-5)


def test_no_position_sees_a_later_one():
    model = decoder()
    ids = tokens(16)
    changed = ids.clone()
    changed[:, 10:] = (changed[:, 10:] + 1) % 67
    with torch.no_grad():
        before, after = model(ids), model(changed)
    torch.testing.assert_close(before[:, :10], after[:, :10], rtol=0, atol=1e-6)
    assert (before[:, 10:] - after[:, 10:]).abs().amax(dim=-1).min() > 0.01


def test_number_of_parameters_is_what_the_config_says():
    for changes in ({}, {"tie_embeddings": False}, {"num_kv_heads": 1, "ffn_dim": 50}):
        model = decoder(**changes)
        assert sum(parameter.numel() for parameter in model.parameters()) == model.config.num_parameters


def test_names_carry_the_global_layer_number():
    names = [name for name, _ in decoder().named_parameters()]
    assert names[0] == "embed.weight"
    assert "layers.1.attn.wq.weight" in names
    assert "output.weight" not in names  # tied: stored once


def test_longer_than_the_model_allows_is_refused():
    with pytest.raises(ValueError, match="17 tokens do not fit into a model of max_seq_len 16"):
        decoder()(tokens(17))


def test_rotary_angles_turn_pairs_half_a_head_apart():
    config = ModelConfig(**MODEL)
    cos_TH, sin_TH = rotary_table(16, config, torch.zeros(1, dtype=torch.float64))
    assert cos_TH.shape == (16, config.head_dim)
    assert cos_TH.dtype == torch.float64
    torch.testing.assert_close(cos_TH[:, :4], cos_TH[:, 4:], rtol=0, atol=0)
    assert sin_TH[5, 0].item() == pytest.approx(torch.tensor(5.0).sin().item(), abs=1e-7)
    slowest = 10_000 ** (-6 / 8)
    assert sin_TH[5, 7].item() == pytest.approx(5 * slowest, rel=1e-3)


def test_loss_sums_over_valid_targets_only():
    logits_BTV = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0))
    targets_BT = torch.tensor([[1, IGNORED, 4], [IGNORED, IGNORED, 0]])
    each = -torch.log_softmax(logits_BTV, dim=-1)
    expected = torch.stack([each[0, 0, 1], each[0, 2, 4], each[1, 2, 0]])
    torch.testing.assert_close(token_loss_sum(logits_BTV, targets_BT), expected.sum())
    losses_BT = token_losses(logits_BTV, targets_BT)
    torch.testing.assert_close(losses_BT[[0, 0, 1], [0, 2, 2]], expected)
    assert losses_BT[0, 1] == losses_BT[1, 0] == 0.0


def test_loss_of_bfloat16_logits_is_computed_in_float32():
    logits_BTV = (torch.randn(1, 4, 50, generator=torch.Generator().manual_seed(0)) * 4).bfloat16()
    targets_BT = torch.tensor([[1, 2, 3, 4]])
    loss = token_loss_sum(logits_BTV, targets_BT)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, token_loss_sum(logits_BTV.float(), targets_BT))
