import itertools
import math
from collections import Counter

import numpy as np
import pytest

from headrace.errors import InputError
from training.evaluation import baselines as module
from training.evaluation.baselines import baselines

TOKEN_BYTES = np.array([0, 1, 2, 3], dtype=np.int32)


class Row:
    def __init__(self, *tokens: int) -> None:
        self.tokens = np.array(tokens, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.tokens)

    def read(self, start: int, length: int) -> np.ndarray:
        assert start + length <= len(self.tokens)
        return self.tokens[start : start + length]


TRAIN = Row(1, 2, 1, 2, 1, 3, 0, 1, 2, 2)
VALIDATION = Row(1, 2, 0, 3, 1)


def by_hand(train: Row, validation: Row) -> tuple[float, float]:
    tokens, vocab = train.tokens.tolist(), len(TOKEN_BYTES)
    counts, pairs = Counter(tokens), Counter(itertools.pairwise(tokens))
    bits = {"unigram": 0.0, "bigram": 0.0}
    size = 0
    targets = validation.tokens.tolist()
    for before, word in itertools.pairwise(targets):
        if not TOKEN_BYTES[word]:
            continue
        size += int(TOKEN_BYTES[word])
        unigram = (counts[word] + 1) / (len(tokens) + vocab)
        kinds = sum(1 for first, _ in pairs if first == before)
        total = sum(n for (first, _), n in pairs.items() if first == before)
        bigram = (pairs[before, word] + kinds * unigram) / (total + kinds) if total else unigram
        bits["unigram"] -= math.log2(unigram)
        bits["bigram"] -= math.log2(bigram)
    return bits["unigram"] / size, bits["bigram"] / size


def test_both_equal_the_formula_by_hand():
    result = baselines(TRAIN, VALIDATION, TOKEN_BYTES)
    assert (result.unigram_bits_per_byte, result.bigram_bits_per_byte) == pytest.approx(by_hand(TRAIN, VALIDATION))
    assert (result.train_tokens, result.bytes) == (10, 6)


@pytest.mark.parametrize("chunk", [1, 3, 9, 10])
def test_counting_in_chunks_changes_nothing(monkeypatch, chunk):
    expected = baselines(TRAIN, VALIDATION, TOKEN_BYTES)
    monkeypatch.setattr(module, "CHUNK_TOKENS", chunk)
    assert baselines(TRAIN, VALIDATION, TOKEN_BYTES) == expected


def test_a_context_that_was_never_seen_falls_back_to_single_tokens():
    train, validation = Row(1, 1, 1, 2), Row(3, 1)
    result = baselines(train, validation, TOKEN_BYTES)
    assert result.bigram_bits_per_byte == result.unigram_bits_per_byte == pytest.approx(-math.log2(4 / 8))


def test_probabilities_of_each_context_add_up_to_one():
    """Through the score: two bits-per-byte values determine every probability of a one-byte vocabulary."""
    token_bytes = np.array([1, 1, 1], dtype=np.int32)
    train = Row(0, 1, 0, 2, 2, 1, 0)
    for before in range(3):
        total = sum(2 ** -baselines(train, Row(before, word), token_bytes).bigram_bits_per_byte for word in range(3))
        assert total == pytest.approx(1.0)


def test_limits_take_the_start_of_each_split():
    short = baselines(Row(*TRAIN.tokens[:6]), Row(*VALIDATION.tokens[:4]), TOKEN_BYTES)
    assert baselines(TRAIN, VALIDATION, TOKEN_BYTES, max_fit_tokens=6, max_tokens=4) == short


def test_a_pattern_is_worth_more_to_the_bigram():
    pattern = Row(*[1, 2, 3] * 200)
    result = baselines(pattern, Row(*[1, 2, 3] * 10), TOKEN_BYTES)
    assert result.bigram_bits_per_byte < 0.05 < 0.7 < result.unigram_bits_per_byte


@pytest.mark.parametrize(("train", "validation"), [(Row(1), VALIDATION), (TRAIN, Row(1)), (TRAIN, Row(1, 0, 0))])
def test_nothing_to_count_is_refused(train, validation):
    with pytest.raises(InputError, match=r"2 tokens in both splits|no text"):
        baselines(train, validation, TOKEN_BYTES)
