"""What a model must beat: token statistics of the training split, scored on the validation split.

    unigram   p(w)     = (count(w) + 1) / (N + V)
    bigram    p(w | v) = (count(v, w) + kinds(v) * p(w)) / (count(v) + kinds(v))      Witten-Bell: `kinds(v)` counts the
                         different tokens seen after v, so a context that was seldom seen leans on the unigram

Both are scored as the model is: every target but the special tokens, which stand for no text. numpy alone.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.errors import InputError

Int64s = NDArray[np.int64]
Float64s = NDArray[np.float64]

CHUNK_TOKENS = 2**22
MAX_FIT_TOKENS = 2**27
"""Training tokens that are counted at most, from the start of the split: the statistics hardly move after that."""


class Stream(Protocol):
    """A split of a dataset."""

    def __len__(self) -> int:
        """Tokens in the split."""

    def read(self, start: int, length: int) -> Int64s:
        """Tokens `start .. start + length - 1`."""


@dataclass(frozen=True)
class Baselines:
    """Bits per byte of the two models, and what they were fitted on and scored on."""

    unigram_bits_per_byte: float
    bigram_bits_per_byte: float
    train_tokens: int
    bytes: int


def baselines(
    train: Stream,
    validation: Stream,
    token_bytes: NDArray[np.int32],
    *,
    max_tokens: int | None = None,
    max_fit_tokens: int = MAX_FIT_TOKENS,
) -> Baselines:
    """Fit on `train`, score the first `max_tokens` of `validation`.

    Raises InputError when there is nothing to fit or to score.
    """
    fitted, scored = min(len(train), max_fit_tokens), min(len(validation), max_tokens or len(validation))
    if fitted < 2 or scored < 2:
        raise InputError(
            f"Baselines need 2 tokens in both splits; there are {len(train)} to fit and {len(validation)} to score."
        )
    vocab_size = len(token_bytes)
    tokens = validation.read(0, scored)
    before, targets = tokens[:-1], tokens[1:]
    is_text = token_bytes[targets] > 0
    before, targets = before[is_text], targets[is_text]
    size = int(token_bytes[targets].sum())
    if size == 0:
        raise InputError("The validation split holds no text, so there are no bytes to score.")

    pairs, pair_counts, counts = _count(train, fitted, vocab_size)
    unigram = (counts + 1.0) / (fitted + vocab_size)
    contexts = pairs // vocab_size
    kinds = np.bincount(contexts, minlength=vocab_size)
    totals = np.bincount(contexts, weights=pair_counts, minlength=vocab_size)
    seen = _lookup(pairs, pair_counts, before * vocab_size + targets)
    below = totals[before] + kinds[before]
    bigram = np.where(below > 0, (seen + kinds[before] * unigram[targets]) / np.maximum(below, 1), unigram[targets])
    return Baselines(
        unigram_bits_per_byte=_bits(unigram[targets]) / size,
        bigram_bits_per_byte=_bits(bigram) / size,
        train_tokens=fitted,
        bytes=size,
    )


def _bits(probabilities: Float64s) -> float:
    return float(-np.log2(probabilities).sum())


def _count(stream: Stream, length: int, vocab_size: int) -> tuple[Int64s, Int64s, Int64s]:
    """Sorted codes (first * V + second) of the pairs that occur, how often each does, and how often each token does."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    pairs, pair_counts = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    for start in range(0, length, CHUNK_TOKENS):
        # One token of overlap: the pair across the border belongs to one chunk.
        tokens = stream.read(start, min(CHUNK_TOKENS + 1, length - start))
        counts += np.bincount(tokens[:CHUNK_TOKENS], minlength=vocab_size)
        new, new_counts = np.unique(tokens[:-1] * vocab_size + tokens[1:], return_counts=True)
        pairs, pair_counts = _merge(pairs, pair_counts, new, new_counts)
    return pairs, pair_counts, counts


def _merge(codes: Int64s, counts: Int64s, new: Int64s, new_counts: Int64s) -> tuple[Int64s, Int64s]:
    joined, inverse = np.unique(np.concatenate([codes, new]), return_inverse=True)
    total = np.zeros(len(joined), dtype=np.int64)
    np.add.at(total, inverse, np.concatenate([counts, new_counts]))
    return joined, total


def _lookup(codes: Int64s, counts: Int64s, wanted: Int64s) -> Int64s:
    """The count of each wanted code, 0 for one that does not occur."""
    place = np.minimum(np.searchsorted(codes, wanted), len(codes) - 1)
    return np.where(codes[place] == wanted, counts[place], 0)
