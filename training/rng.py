"""The random state of one rank as one tensor of bytes: torch on CPU and CUDA, numpy and Python.

The engine itself draws no random number while it trains (the initial weights and the sample order have generators of
their own), but a model with dropout or a user's hook would, and a resume must not depend on who drew what.
"""

import hashlib
import random
import struct

import numpy as np
import torch
from torch import Tensor

_PYTHON_WORDS = 625
_NUMPY_WORDS = 624
_HEADER = struct.Struct("<IIII")
"""Bytes of the four parts: torch CPU, torch CUDA, Python, numpy."""
_PYTHON = struct.Struct(f"<I{_PYTHON_WORDS}I?d")
_NUMPY = struct.Struct(f"<{_NUMPY_WORDS}IIId")


def seed_rank(seed: int, rank: int) -> None:
    """Give this rank its own random state, a function of the run's seed and the rank alone."""
    digest = hashlib.sha256(f"rank/{seed}/{rank}".encode()).digest()
    value = int.from_bytes(digest[:8], "little")
    torch.manual_seed(value)
    random.seed(value)
    np.random.seed(value % 2**32)


def capture_random_state() -> Tensor:
    """The state of every generator of this process, as a uint8 tensor on CPU of always the same length on a device."""
    on_cpu = torch.get_rng_state().numpy().tobytes()
    on_cuda = torch.cuda.get_rng_state().numpy().tobytes() if torch.cuda.is_available() else b""
    version, words, gauss = random.getstate()
    python = _PYTHON.pack(version, *words, gauss is not None, gauss or 0.0)
    _, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    numpy = _NUMPY.pack(*np.asarray(keys).tolist(), position, has_gauss, cached)
    header = _HEADER.pack(len(on_cpu), len(on_cuda), len(python), len(numpy))
    return torch.frombuffer(bytearray(header + on_cpu + on_cuda + python + numpy), dtype=torch.uint8)


def restore_random_state(state: Tensor) -> None:
    """Set every generator from a tensor of `capture_random_state`; a CUDA part is dropped where there is no CUDA."""
    data = state.cpu().numpy().tobytes()
    lengths = _HEADER.unpack_from(data)
    parts, start = [], _HEADER.size
    for length in lengths:
        parts.append(data[start : start + length])
        start += length
    on_cpu, on_cuda, python, numpy = parts
    torch.set_rng_state(torch.frombuffer(bytearray(on_cpu), dtype=torch.uint8))
    if on_cuda and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.frombuffer(bytearray(on_cuda), dtype=torch.uint8))
    version, *words, has_gauss, gauss = _PYTHON.unpack(python)
    random.setstate((version, tuple(words), gauss if has_gauss else None))
    *keys, position, has_gauss, cached = _NUMPY.unpack(numpy)
    np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, has_gauss, cached))
