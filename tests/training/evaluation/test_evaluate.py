"""The evaluation counts every token once, whatever the ranks and batches."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from headrace.errors import InputError
from tests.training.toy import MODEL, ArrayTokens, alone, corpus, run_spec
from training.evaluation.evaluate import EvalResult, evaluate
from training.evaluation.spec import EvalSpec
from training.parallel.engine import Engine
from training.parallel.world import World

WINDOW = 16
VOCAB = MODEL["vocab_size"]
TOKEN_BYTES = np.array([0, *(1 + np.arange(VOCAB - 1) % 4)], dtype=np.int32)
"""Token 0 stands for no text, the others for one to four bytes."""


def spec(**changes: Any) -> EvalSpec:
    return EvalSpec(
        **{
            "dataset_digest": "d",
            "tokenizer_digest": "t",
            "window": WINDOW,
            "precision": "float64",
            **changes,
        }
    )


def with_ends(length: int) -> ArrayTokens:
    """Documents of 50 tokens, each ended by token 0; the last one is cut off."""
    tokens = corpus(600, VOCAB).read_many(np.array([0]), length)[0].copy()
    ends = np.arange(50, length + 1, 50)
    tokens[ends - 1] = 0
    return ArrayTokens(tokens, ends)


def score(
    world: World, length: int, batch_size: int, precision: str = "float64", max_tokens: int | None = None
) -> dict[str, Any]:
    engine = Engine.build(run_spec().model, world, precision=precision, seed=5)
    result = evaluate(
        engine.infer,
        with_ends(length),
        spec(precision=precision, max_tokens=max_tokens),
        TOKEN_BYTES,
        world=world,
        batch_size=batch_size,
    )
    return dataclasses.asdict(result)


def nats_by_hand(length: int) -> tuple[np.ndarray, np.ndarray]:
    """Targets and their nats, window after window, one at a time."""
    engine = Engine.build(run_spec().model, alone(), precision="float64", seed=5)
    tokens = with_ends(length).read_many(np.array([0]), length)[0]
    nats = []
    for start in range(0, length - 1, WINDOW):
        ids = torch.from_numpy(tokens[start : start + WINDOW + 1])
        logits_TV = engine.infer(ids[None, :-1])[0]
        nats.extend(-torch.log_softmax(logits_TV, dim=-1)[torch.arange(len(ids) - 1), ids[1:]].numpy())
    return tokens[1:], np.array(nats)


def assert_same(one: dict[str, Any], other: dict[str, Any], tolerance: float) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        if name == "documents":
            assert len(value) == len(other[name])
            for a, b in zip(value, other[name], strict=True):
                assert a == pytest.approx(b, rel=tolerance)
        else:
            assert value == pytest.approx(other[name], rel=tolerance), name


def test_every_number_equals_the_sum_by_hand():
    length = 163  # ten windows and a short one; three documents and a piece
    targets, nats = nats_by_hand(length)
    text = TOKEN_BYTES[targets] > 0
    size = int(TOKEN_BYTES[targets].sum())
    result = score(alone(), length, 4)
    assert result["tokens"] == 162
    assert result["bytes"] == size
    assert result["loss"] == pytest.approx(nats.mean(), rel=1e-12)
    assert result["perplexity"] == pytest.approx(math.exp(nats.mean()), rel=1e-12)
    assert result["nats"] == pytest.approx(nats[text].sum(), rel=1e-12)
    assert result["bits_per_byte"] == pytest.approx(nats[text].sum() / math.log(2) / size, rel=1e-12)
    assert result["tokens_by_position"] == [11, 11, *[10] * 14]
    assert result["nats_by_position"][3] == pytest.approx(nats[3::16].sum(), rel=1e-12)
    # document n holds the tokens n*50 .. n*50+49; target i is token i+1
    assert [document["tokens"] for document in result["documents"]] == [49, 50, 50, 13]
    third = slice(99, 149)
    assert result["documents"][2] == {
        "document": 2,
        "tokens": 50,
        "bytes": int(TOKEN_BYTES[targets[third]].sum()),
        "nats": pytest.approx(nats[third][text[third]].sum(), rel=1e-12),
    }


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("batch_size", [1, 4])
def test_result_depends_on_neither_ranks_nor_batch_size(run_ranks, world_size, batch_size):
    reference = score(alone(), 163, 16)
    for result in run_ranks(world_size, score, 163, batch_size):
        assert_same(reference, result, 1e-12)


@pytest.mark.parametrize("length", [2, 17, 18, 113])
def test_fewer_windows_than_ranks_never_hang(run_ranks, length):
    """Seven windows, one, or a part of one, for four ranks."""
    reference = score(alone(), length, 1)
    assert reference["tokens"] == length - 1
    for result in run_ranks(4, score, length, 1):
        assert_same(reference, result, 1e-12)


def test_in_float32_ranks_agree_to_a_millionth(run_ranks):
    reference = score(alone(), 300, 16, "float32")
    for result in run_ranks(2, score, 300, 3, "float32"):
        assert_same(reference, result, 1e-6)


def test_bfloat16_is_the_same_arithmetic_on_one_rank_and_on_two(run_ranks):
    reference = score(alone(), 300, 4, "bfloat16")
    assert reference["loss"] != pytest.approx(score(alone(), 300, 4, "float32")["loss"], rel=1e-6)
    for result in run_ranks(2, score, 300, 4, "bfloat16"):
        assert_same(reference, result, 1e-6)


def test_max_tokens_takes_the_start_of_the_split():
    assert_same(score(alone(), 120, 4), score(alone(), 500, 4, max_tokens=120), 1e-12)


def test_special_tokens_count_for_the_loss_but_not_for_bits_per_byte():
    """A forward pass that is certain of everything but the special token 0."""

    def forward(tokens_BT: Tensor) -> Tensor:
        following_BT = torch.tensor([[2, 0, 3]])
        logits_BTV = torch.nn.functional.one_hot(following_BT, 5).double() * 100
        logits_BTV[0, 1] = 0.0
        return logits_BTV

    tokens = ArrayTokens(np.array([1, 2, 0, 3]), np.array([3]))
    token_bytes = np.array([0, 1, 1, 1, 1], dtype=np.int32)
    result = evaluate(forward, tokens, spec(window=3), token_bytes, world=alone(), batch_size=1)
    assert result.loss == pytest.approx(math.log(5) / 3)
    assert result.bits_per_byte == pytest.approx(0.0, abs=1e-12)
    assert (result.tokens, result.bytes) == (3, 2)


@pytest.mark.parametrize("length", [0, 1])
def test_a_split_without_a_target_is_refused_by_name(length):
    with pytest.raises(InputError, match=f"The validation split holds {length} tokens; at least 2 are needed"):
        evaluate(lambda ids: ids, with_ends(length), spec(), TOKEN_BYTES, world=alone(), batch_size=1)


def test_text_without_bytes_has_no_bits_per_byte():
    tokens = ArrayTokens(np.zeros(5, dtype=np.int64))
    engine = Engine.build(run_spec().model, alone(), precision="float32", seed=5)
    result: EvalResult = evaluate(engine.infer, tokens, spec(), TOKEN_BYTES, world=alone(), batch_size=1)
    assert math.isnan(result.bits_per_byte)
    assert result.loss > 0


def test_progress_counts_windows():
    told: list[tuple[int, int]] = []
    engine = Engine.build(run_spec().model, alone(), precision="float32", seed=5)
    evaluate(
        engine.infer,
        with_ends(163),
        spec(),
        TOKEN_BYTES,
        world=alone(),
        batch_size=4,
        on_progress=lambda done, total: told.append((done, total)),
    )
    assert told == [(4, 11), (8, 11), (10, 11), (11, 11)]


def test_spec_digest_changes_with_what_is_measured():
    assert spec().digest == spec().digest
    changes = [{"window": 8}, {"max_tokens": 100}, {"precision": "float32"}, {"prompts": ("a",)}, {"split": "train"}]
    assert len({spec().digest, *(spec(**change).digest for change in changes)}) == 6
