"""Which sample a step sees: a pure function of (plan digest, seed, position).

Positions count samples from the start of training. Position p lies in epoch p // n, and each epoch is one permutation
of the n samples. The permutation is computed, not stored: a Feistel network over the smallest power of two >= n,
walked until it lands below n. So nothing has to be saved or shuffled, any rank can ask for any position, and memory
does not grow with n.
"""

import functools
import hashlib

import numpy as np
import numpy.typing as npt

ROUNDS = 4
"""Enough for a Feistel network whose round function mixes well: with 3 or more, no structure of the input is left."""

Indices = npt.NDArray[np.int64]


class SampleOrder:
    """The order of `num_samples` samples for one plan and one seed."""

    def __init__(self, plan_digest: str, seed: int, num_samples: int) -> None:
        if num_samples < 1:
            raise ValueError(f"an order needs at least one sample, got num_samples={num_samples}")
        self.plan_digest = plan_digest
        self.seed = seed
        self.num_samples = num_samples
        bits = max(1, (num_samples - 1).bit_length())
        self._left_bits = bits // 2
        self._right_bits = bits - bits // 2
        self._keys = functools.lru_cache(maxsize=8)(self._round_keys)

    def indices(self, positions: Indices) -> Indices:
        """Return the sample at each position (any shape, each >= 0). Raises ValueError for a negative position."""
        positions = np.asarray(positions, dtype=np.int64)
        if positions.size and int(positions.min()) < 0:
            raise ValueError(f"positions count from 0, got {int(positions.min())}")
        epochs, within = np.divmod(positions.ravel(), self.num_samples)
        result = np.empty(positions.size, dtype=np.int64)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            result[chosen] = self._permute(within[chosen], self._keys(int(epoch)))
        return result.reshape(positions.shape)

    def _permute(self, values: Indices, keys: tuple[int, ...]) -> Indices:
        """Cycle walking: apply the permutation of the power of two again until the value is below n."""
        result = self._feistel(values.astype(np.uint64), keys)
        outside = np.flatnonzero(result >= self.num_samples)
        while outside.size:
            walked = self._feistel(result[outside], keys)
            result[outside] = walked
            outside = outside[walked >= self.num_samples]
        return result.astype(np.int64)

    def _feistel(self, values: npt.NDArray[np.uint64], keys: tuple[int, ...]) -> npt.NDArray[np.uint64]:
        right = values & np.uint64(2**self._right_bits - 1)
        left = values >> np.uint64(self._right_bits)
        for number, key in enumerate(keys):
            if number % 2 == 0:
                left ^= _mix(right, key, self._left_bits)
            else:
                right ^= _mix(left, key, self._right_bits)
        left <<= np.uint64(self._right_bits)
        left |= right
        return left

    def _round_keys(self, epoch: int) -> tuple[int, ...]:
        text = f"headrace-order-1:{self.plan_digest}:{self.seed}:{epoch}"
        digests = [hashlib.sha256(f"{text}:{number}".encode()).digest() for number in range(ROUNDS)]
        return tuple(int.from_bytes(digest[:8], "little") for digest in digests)


def _mix(values: npt.NDArray[np.uint64], key: int, bits: int) -> npt.NDArray[np.uint64]:
    """The upper `bits` bits of a 64-bit mix of value and key: add, multiply, fold, multiply."""
    if bits == 0:
        return np.zeros_like(values)
    mixed = values + np.uint64(key)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(32)
    mixed *= np.uint64(0x94D049BB133111EB)
    mixed >>= np.uint64(64 - bits)
    return mixed
