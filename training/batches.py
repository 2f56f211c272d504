"""(position, data-parallel rank) -> batch. Nothing here counts or remembers: the position comes from the state.

position          0 .. G-1 | G .. 2G-1 | ...      G = global_batch_size; one step takes one such group
sample order      a permutation of the epoch's samples, keyed by (plan digest, seed, epoch)
rank r of dp      rows r*G/dp .. (r+1)*G/dp - 1 of the group, so the union over ranks is the same for any dp
sample i          tokens[i*L : i*L + L + 1]       L = seq_len; targets are the inputs shifted by one
"""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from training.model.loss import IGNORED

Int64s = NDArray[np.int64]


class Tokens(Protocol):
    """A split of a dataset as one long row of token ids."""

    def __len__(self) -> int:
        """Tokens in the split."""

    def read_many(self, starts: Int64s, length: int) -> Int64s:
        """One row for each start: the `length` tokens from there on."""


class Order(Protocol):
    """The order in which samples are taken, over all epochs."""

    def indices(self, positions: Int64s) -> Int64s:
        """The sample at each position."""


@dataclass(frozen=True)
class Batch:
    """One rank's share of a global batch: int64 (B, T); targets are IGNORED where a token has no loss."""

    tokens_BT: Tensor
    targets_BT: Tensor

    @property
    def num_valid(self) -> int:
        """Targets that have a loss."""
        return int((self.targets_BT != IGNORED).sum())

    def split(self, size: int) -> Iterator["Batch"]:
        """Micro-batches of at most `size` sequences."""
        for tokens_BT, targets_BT in zip(self.tokens_BT.split(size), self.targets_BT.split(size), strict=True):
            yield Batch(tokens_BT, targets_BT)

    def to(self, device: torch.device) -> "Batch":
        """The batch on `device`."""
        return Batch(self.tokens_BT.to(device, non_blocking=True), self.targets_BT.to(device, non_blocking=True))


def num_samples(num_tokens: int, seq_len: int) -> int:
    """Whole samples in a split: the last target of the last one must exist."""
    return max(0, (num_tokens - 1) // seq_len)


class Batches:
    """Reads one rank's batches; the next one is read on a thread while the current one is computed."""

    def __init__(
        self, tokens: Tokens, order: Order, *, seq_len: int, global_batch_size: int, dp_rank: int = 0, dp: int = 1
    ) -> None:
        assert global_batch_size % dp == 0
        self._tokens = tokens
        self._order = order
        self._seq_len = seq_len
        self._global_batch_size = global_batch_size
        self._local_batch_size = global_batch_size // dp
        self._dp_rank = dp_rank
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self._ahead: tuple[int, Future[Batch]] | None = None

    def take(self, position: int) -> Batch:
        """The batch whose global batch starts at `position`; starts to read the one after it."""
        if self._ahead is not None and self._ahead[0] == position:
            batch = self._ahead[1].result()
        else:
            batch = self.read(position)
        following = position + self._global_batch_size
        self._ahead = (following, self._reader.submit(self.read, following))
        return batch

    def sample_indices(self, position: int) -> Int64s:
        """The samples of this rank's rows of the global batch that starts at `position`."""
        first = position + self._dp_rank * self._local_batch_size
        return self._order.indices(np.arange(first, first + self._local_batch_size, dtype=np.int64))

    def read(self, position: int) -> Batch:
        """The batch at `position`, read now."""
        starts = self.sample_indices(position) * self._seq_len
        tokens = torch.from_numpy(self._tokens.read_many(starts, self._seq_len + 1))
        return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())

    def close(self) -> None:
        """Stop reading ahead."""
        self._reader.shutdown(wait=False, cancel_futures=True)
