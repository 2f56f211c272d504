"""The evaluation, used by the training loop and by the stage: the loss of every token of a split, counted once.

    window i        tokens[i*L : i*L + L + 1]; the last one is shorter, so every token but the first is a target once
    round           each rank takes up to `batch_size` windows; a rank that has none left computes a dummy window,
                    because the forward pass of a sharded model is a meeting of all ranks
    sums            float64, added over ranks once at the end; never a mean of means

Bits per byte leave special tokens (which stand for no text) out: no bytes and no nats. Loss and perplexity count them.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.errors import InputError
from training.batches import Int64s, Tokens
from training.evaluation.spec import EvalSpec
from training.model.loss import token_losses
from training.parallel.world import World

Float64s = NDArray[np.float64]


class Documents(Tokens, Protocol):
    """A split that knows where its documents end."""

    def document_ends(self, start: int, stop: int) -> Int64s:
        """Positions right after the last token of each document, those in (start, stop]."""


@dataclass(frozen=True)
class EvalResult:
    """What an evaluation found; sums are over all target tokens unless they say otherwise."""

    loss: float
    """Mean nats per target token."""
    perplexity: float
    bits_per_byte: float
    nats: float
    """Sum over the target tokens that stand for text: the numerator of bits per byte."""
    tokens: int
    bytes: int
    nats_by_position: list[float]
    """Sum of nats of the targets at each position of their window."""
    tokens_by_position: list[int]
    documents: list[dict[str, Any]] = field(repr=False)
    """One record per document: index, tokens, bytes, nats (text tokens only)."""

    def summary(self) -> dict[str, Any]:
        """The result without the per-document records."""
        return {name: value for name, value in vars(self).items() if name != "documents"}


def evaluate(
    forward: Callable[[Tensor], Tensor],
    tokens: Documents,
    spec: EvalSpec,
    token_bytes: NDArray[np.int32],
    *,
    world: World,
    batch_size: int,
    on_progress: Callable[[int, int], None] | None = None,
) -> EvalResult:
    """Score a split with `forward` (token ids (B, T) to logits (B, T, V)); every rank of `world` gets the result.

    `token_bytes` holds the UTF-8 bytes that each token id stands for, 0 for special tokens. `on_progress` is told
    windows done and windows in all. Raises InputError when the split holds no target.
    """
    available = min(len(tokens), spec.max_tokens or len(tokens))
    if available < 2:
        raise InputError(
            f"The {spec.split} split holds {len(tokens)} tokens; at least 2 are needed to score one. "
            "Add documents or raise data.validation_fraction."
        )
    ends = tokens.document_ends(0, available)
    sums = _Sums.empty(spec.window, len(ends) + 1)
    bytes_of = np.asarray(token_bytes, dtype=np.int64)
    with torch.no_grad():
        for windows in _rounds(available, spec.window, batch_size, world.dp):
            mine = windows.of_rank(world.dp_rank)
            rows = tokens.read_many(mine, windows.length + 1)
            ids = torch.from_numpy(rows if len(mine) else np.zeros((1, windows.length + 1), dtype=np.int64))
            ids = ids.to(world.device)
            losses = token_losses(forward(ids[:, :-1]), ids[:, 1:]).double().cpu().numpy()
            for start, row, nats in zip(mine.tolist(), rows, losses, strict=False):
                sums.add(start, row[1:], nats, bytes_of, ends)
            if on_progress is not None:
                on_progress(windows.first + windows.count, windows.total)
    return sums.over(world).result()


@dataclass(frozen=True)
class _Round:
    """The windows that all ranks score in one forward pass each."""

    first: int
    count: int
    total: int
    length: int
    window: int
    batch_size: int

    def of_rank(self, dp_rank: int) -> Int64s:
        """Where the windows of one rank start in the split; may be none."""
        begin = dp_rank * self.batch_size
        end = min(begin + self.batch_size, self.count)
        return (self.first + np.arange(begin, end, dtype=np.int64)) * self.window


def _rounds(available: int, window: int, batch_size: int, dp: int) -> Iterator[_Round]:
    """Full windows, `dp * batch_size` at a time, then the short one that is left."""
    full, rest = divmod(available - 1, window)
    total = full + (1 if rest else 0)
    for first in range(0, full, dp * batch_size):
        yield _Round(first, min(dp * batch_size, full - first), total, window, window, batch_size)
    if rest:
        yield _Round(full, 1, total, rest, window, 1)


@dataclass
class _Sums:
    """What one rank, then all ranks together, have added up."""

    all_nats_by_position: Float64s
    tokens_by_position: Float64s
    document_tokens: Float64s
    document_bytes: Float64s
    document_nats: Float64s

    @classmethod
    def empty(cls, window: int, documents: int) -> "_Sums":
        return cls(np.zeros(window), np.zeros(window), np.zeros(documents), np.zeros(documents), np.zeros(documents))

    def add(self, start: int, targets: Int64s, nats: Float64s, bytes_of: Int64s, ends: Int64s) -> None:
        """Count one window whose first *input* lies at `start`: its first target lies one further."""
        self.all_nats_by_position[: len(nats)] += nats
        self.tokens_by_position[: len(nats)] += 1
        positions = np.arange(start + 1, start + 1 + len(targets))
        document = np.searchsorted(ends, positions, side="right")
        target_bytes = bytes_of[targets]
        np.add.at(self.document_tokens, document, 1)
        np.add.at(self.document_bytes, document, target_bytes)
        np.add.at(self.document_nats, document, np.where(target_bytes > 0, nats, 0.0))

    def over(self, world: World) -> "_Sums":
        """The sums over all ranks: one reduction of everything."""
        parts = list(vars(self).values())
        joined = torch.from_numpy(np.concatenate(parts)).to(world.device)
        summed = world.sum(joined).cpu().numpy()
        return _Sums(*np.split(summed, np.cumsum([len(part) for part in parts])[:-1]))

    def result(self) -> EvalResult:
        tokens = int(self.tokens_by_position.sum())
        loss = float(self.all_nats_by_position.sum() / tokens)
        nats, size = float(self.document_nats.sum()), int(self.document_bytes.sum())
        return EvalResult(
            loss=loss,
            perplexity=math.exp(min(loss, 700.0)),
            bits_per_byte=nats / math.log(2) / size if size else math.nan,
            nats=nats,
            tokens=tokens,
            bytes=size,
            nats_by_position=self.all_nats_by_position.tolist(),
            tokens_by_position=self.tokens_by_position.astype(np.int64).tolist(),
            documents=[
                {"document": number, "tokens": int(count), "bytes": int(size), "nats": float(nats)}
                for number, (count, size, nats) in enumerate(
                    zip(self.document_tokens, self.document_bytes, self.document_nats, strict=True)
                )
                if count
            ],
        )
