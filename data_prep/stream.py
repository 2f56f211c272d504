"""Random access to the tokens of a dataset, as one long stream per split.

    units in the order of the manifest -> blocks in order -> [local tar, mapped into memory] -> ids

A tar on a folder store is mapped where it lies; one on an object store is first copied, whole, into a local cache of
bounded size. Every block is checked against its digest when a process touches it for the first time.
"""

import bisect
import hashlib
import logging
import mmap
import os
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from data_prep.shards import BlockEntry
from headrace.commit import FileEntry
from headrace.errors import DamagedData
from headrace.storage import Storage

logger = logging.getLogger(__name__)

CACHE_BYTES = 32 * 2**30
OPEN_SHARDS = 512
"""Tars that are kept mapped; each holds one open file."""

Tokens = npt.NDArray[np.int64]


@dataclass(frozen=True)
class StreamBlock:
    """One block of the stream: its entry, and the unit that holds its tar."""

    prefix: str
    """Where the unit lies on the store."""
    entry: BlockEntry


class TokenStream:
    """The tokens of one split. `len()` is the number of tokens; positions count from 0."""

    def __init__(
        self,
        shards: "ShardFiles",
        blocks: Sequence[StreamBlock],
        dtype: str,
    ) -> None:
        self._shards = shards
        self._blocks = blocks
        self._dtype = np.dtype(dtype)
        self._starts = [0]
        for block in blocks:
            self._starts.append(self._starts[-1] + block.entry.tokens)
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
        result = np.empty(length, dtype=np.int64)
        self._copy(start, result)
        return result

    def read_many(self, starts: Sequence[int] | Tokens, length: int) -> Tokens:
        """Return int64[len(starts), length]: `length` tokens from each of the positions on. Raises as `read` does."""
        result = np.empty((len(starts), length), dtype=np.int64)
        for row, start in zip(result, starts, strict=True):
            self._copy(int(start), row)
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

    def _copy(self, start: int, result: Tokens) -> None:
        length = len(result)
        if start < 0 or start + length > self._starts[-1]:
            raise IndexError(f"[{start}, {start + length}) is not inside a stream of {len(self)} tokens")
        number = bisect.bisect_right(self._starts, start) - 1
        done = 0
        while done < length:
            within = start + done - self._starts[number]
            ids = self._ids(number)
            taken = min(length - done, len(ids) - within)
            result[done : done + taken] = ids[within : within + taken]
            done += taken
            number += 1

    def _ids(self, number: int) -> npt.NDArray[np.generic]:
        entry = self._blocks[number].entry
        return np.frombuffer(self._data(number), self._dtype, entry.tokens, entry.offset)

    def _ends(self, number: int) -> Tokens:
        entry = self._blocks[number].entry
        return np.frombuffer(self._data(number), "<u4", entry.documents, entry.ends_offset).astype(np.int64)

    def _data(self, number: int) -> mmap.mmap:
        """The tar of a block, which is checked on the first touch."""
        block = self._blocks[number]
        data = self._shards.open(block.prefix, block.entry.shard)
        if self._verified[number]:
            return data
        if not self._is_whole(block.entry, data) and self._shards.forget_copy(block.prefix, block.entry.shard):
            data = self._shards.open(block.prefix, block.entry.shard)
        if not self._is_whole(block.entry, data):
            raise DamagedData(
                f"{self._shards.describe(block.prefix, block.entry.shard)} is damaged: the block at byte "
                f"{block.entry.offset:,} is not what was committed. Delete the folder {block.prefix} and prepare the "
                "dataset again."
            )
        self._verified[number] = 1
        return data

    def _is_whole(self, entry: BlockEntry, data: mmap.mmap) -> bool:
        with memoryview(data) as view:
            digest = hashlib.sha256(view[entry.offset : entry.offset + entry.tokens * self._dtype.itemsize])
            digest.update(view[entry.ends_offset : entry.ends_offset + 4 * entry.documents])
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
        self._open: OrderedDict[tuple[str, str], mmap.mmap] = OrderedDict()

    def open(self, prefix: str, shard: str) -> mmap.mmap:
        """Return the mapped tar. Raises DamagedData when it is missing or its size is not what was committed."""
        known = self._open.get((prefix, shard))
        if known is not None:
            return known
        path = self._storage.local_path(f"{prefix}/{shard}") or self._cached(prefix, shard)
        self._open[prefix, shard] = mapped = self._map(path, prefix, shard)
        if len(self._open) > OPEN_SHARDS:
            self._open.popitem(last=False)  # arrays that were handed out keep their map alive
        return mapped

    def forget_copy(self, prefix: str, shard: str) -> bool:
        """Remove the local copy of a tar; return False when there is none, because the store is a folder."""
        if self._storage.local_path(f"{prefix}/{shard}") is not None:
            return False
        self._open.pop((prefix, shard), None)
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
        self._storage.get_file(f"{prefix}/{shard}", path)
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
