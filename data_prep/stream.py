"""Random access to the tokens of a dataset, as one long stream per split.

    units in the order of the manifest -> blocks in order -> [local tar, mapped into memory] -> ids

A tar on a folder store is mapped where it lies; one on an object store is first copied, whole, into a local cache of
bounded size. Every block is checked against its digest when a process touches it for the first time.
"""

import bisect
import hashlib
import itertools
import logging
import mmap
import os
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from data_prep.shards import BlockEntry
from headrace.commit import FileEntry
from headrace.errors import DamagedData
from headrace.patience import patiently
from headrace.storage import Storage

logger = logging.getLogger(__name__)

CACHE_BYTES = 32 * 2**30
PATIENCE_SECONDS = 90.0
"""How long a copy is tried again while the store is away: training pauses then, and is not yet taken for hanging."""

MAPPED_SHARDS = 512
"""Tars of one stream that are kept mapped; each holds one open file."""

Tokens = npt.NDArray[np.int64]
Stored = npt.NDArray[np.unsignedinteger[Any]]
"""Ids as they are stored, uint16 or uint32."""


@dataclass(frozen=True)
class StreamBlock:
    """One block of the stream: its entry, and the unit that holds its tar."""

    prefix: str
    """Where the unit lies on the store."""
    entry: BlockEntry


class TokenStream:
    """The tokens of one split. `len()` is the number of tokens; positions count from 0."""

    def __init__(self, shards: "ShardFiles", blocks: Sequence[StreamBlock], dtype: str) -> None:
        self._shards = shards
        self._blocks = blocks
        self._dtype = np.dtype(dtype)
        self._starts = [0, *itertools.accumulate(block.entry.tokens for block in blocks)]
        # What a read needs is looked up by the number of the block or of its tar: a read takes microseconds.
        places = [(block.prefix, block.entry.shard) for block in blocks]
        self._tars = list(dict.fromkeys(places))
        numbers = {place: number for number, place in enumerate(self._tars)}
        self._tar_of = [numbers[place] for place in places]
        self._first = [block.entry.offset // self._dtype.itemsize for block in blocks]
        self._views: list[Stored | None] = [None] * len(self._tars)
        self._mapped: deque[int] = deque()
        self._verified = bytearray(len(blocks))

    def __len__(self) -> int:
        """Return the number of tokens."""
        return self._starts[-1]

    @property
    def num_documents(self) -> int:
        """Documents in the stream."""
        return sum(block.entry.documents for block in self._blocks)

    def num_sequences(self, seq_len: int) -> int:
        """Return how many sequences of `seq_len` tokens (and one more as the last target) the stream has."""
        return max(0, len(self) - 1) // seq_len

    def read(self, start: int, length: int) -> Tokens:
        """Return int64[length]: the tokens from position `start` on.

        Raises IndexError when they are not all there, DamagedData when a stored block is not what was committed.
        """
        sequence: Tokens = self.read_many([start], length)[0]
        return sequence

    def read_many(self, starts: Sequence[int] | Tokens, length: int) -> Tokens:
        """Return int64[len(starts), length]: `length` tokens from each of the positions on. Raises as `read` does."""
        result = np.empty((len(starts), length), dtype=np.int64)
        size = len(self)
        for row, start in enumerate(np.asarray(starts, dtype=np.int64).tolist()):
            if start < 0 or start + length > size:
                raise IndexError(f"[{start}, {start + length}) is not inside a stream of {size} tokens")
            number = bisect.bisect_right(self._starts, start) - 1
            done = 0
            while done < length:
                taken = min(length - done, self._starts[number + 1] - start - done)
                first = self._first[number] + start + done - self._starts[number]
                result[row, done : done + taken] = self._view(number)[first : first + taken]
                done += taken
                number += 1
        return result

    def document_ends(self, start: int, stop: int) -> Tokens:
        """Return the positions p with start < p <= stop that stand right after the last token of a document."""
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"[{start}, {stop}) is not inside a stream of {len(self)} tokens")
        found = [np.empty(0, dtype=np.int64)]
        number = bisect.bisect_right(self._starts, start) - 1
        while number < len(self._blocks) and self._starts[number] < stop:
            found.append(self._ends(number) + self._starts[number])
            number += 1
        ends = np.concatenate(found)
        return ends[(ends > start) & (ends <= stop)]

    def _ends(self, number: int) -> Tokens:
        entry = self._blocks[number].entry
        first = entry.ends_offset // 4
        return self._view(number).view("<u4")[first : first + entry.documents].astype(np.int64)

    def _view(self, number: int) -> Stored:
        """The whole tar of a block as one array of ids; the block is checked on its first touch."""
        view = self._views[self._tar_of[number]]
        if view is None:
            view = self._map(self._tar_of[number])
        if not self._verified[number]:
            view = self._verify(number, view)
        return view

    def _map(self, tar: int) -> Stored:
        view = np.frombuffer(self._shards.map(*self._tars[tar]), self._dtype)
        self._views[tar] = view
        self._mapped.append(tar)
        if len(self._mapped) > MAPPED_SHARDS:
            self._views[self._mapped.popleft()] = None
        return view

    def _verify(self, number: int, view: Stored) -> Stored:
        prefix, shard = place = self._tars[self._tar_of[number]]
        if not self._is_whole(number, view) and self._shards.forget_copy(*place):
            self._mapped.remove(self._tar_of[number])
            view = self._map(self._tar_of[number])
        if not self._is_whole(number, view):
            raise DamagedData(
                f"{self._shards.describe(prefix, shard)} is damaged: the block at byte "
                f"{self._blocks[number].entry.offset:,} is not what was committed. Delete the folder {prefix} and "
                "prepare the dataset again."
            )
        self._verified[number] = 1
        return view

    def _is_whole(self, number: int, view: Stored) -> bool:
        entry = self._blocks[number].entry
        data = view.view(np.uint8).data
        digest = hashlib.sha256(data[entry.offset : entry.offset + entry.tokens * self._dtype.itemsize])
        digest.update(data[entry.ends_offset : entry.ends_offset + 4 * entry.documents])
        return digest.hexdigest() == entry.sha256


class ShardFiles:
    """The tars of a dataset as memory maps: of the store's own files, or of copies in a local cache."""

    def __init__(
        self, storage: Storage, files: dict[str, FileEntry], cache_dir: Path, cache_bytes: int = CACHE_BYTES
    ) -> None:
        self._storage = storage
        self._files = files
        self._cache_dir = cache_dir
        self._cache_bytes = cache_bytes

    def map(self, prefix: str, shard: str) -> mmap.mmap:
        """Return the mapped tar. Raises DamagedData when it is missing or its size is not what was committed."""
        path = self._storage.local_path(f"{prefix}/{shard}") or self._cached(prefix, shard)
        return self._map(path, prefix, shard)

    def forget_copy(self, prefix: str, shard: str) -> bool:
        """Remove the local copy of a tar; return False when there is none, because the store is a folder."""
        if self._storage.local_path(f"{prefix}/{shard}") is not None:
            return False
        self._cache_path(prefix, shard).unlink(missing_ok=True)
        return True

    def describe(self, prefix: str, shard: str) -> str:
        """Return where a tar lies, for messages."""
        return self._storage.url(f"{prefix}/{shard}")

    def _map(self, path: Path, prefix: str, shard: str) -> mmap.mmap:
        expected = self._files[f"{prefix}/{shard}"].size
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size != expected:
                    raise DamagedData(
                        f"{self.describe(prefix, shard)} has {size:,} bytes, but {expected:,} were committed. "
                        f"Delete the folder {prefix} and prepare the dataset again."
                    )
                return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError as error:
            raise DamagedData(
                f"{self.describe(prefix, shard)} is missing. Delete the folder {prefix} and prepare the dataset again."
            ) from error

    def _cached(self, prefix: str, shard: str) -> Path:
        """Copy a tar into the cache unless it is there; the least recently used ones make room."""
        entry = self._files[f"{prefix}/{shard}"]
        path = self._cache_path(prefix, shard)
        if path.exists() and path.stat().st_size == entry.size:
            os.utime(path)
            return path
        self._cache_dir.mkdir(parents=True, exist_ok=True)
        self._make_room(entry.size)
        until = time.monotonic() + PATIENCE_SECONDS
        patiently(lambda: self._storage.get_file(f"{prefix}/{shard}", path), until)
        return path

    def _cache_path(self, prefix: str, shard: str) -> Path:
        return self._cache_dir / f"{self._files[f'{prefix}/{shard}'].sha256}.tar"

    def _make_room(self, needed: int) -> None:
        """Remove copies of ours, oldest use first; a process that still maps one keeps its bytes."""
        copies = []
        for path in self._cache_dir.glob("*.tar"):
            try:
                status = path.stat()
            except FileNotFoundError:
                continue  # another rank made room at the same time
            copies.append((status.st_mtime, status.st_size, path))
        total = sum(size for _, size, _ in copies)
        for _, size, path in sorted(copies):
            if total + needed <= self._cache_bytes:
                return
            path.unlink(missing_ok=True)
            total -= size
