"""Blocks of tokens into plain WebDataset tar files, the same bytes every time.

One sample of a tar is one block: `000000017.tokens.bin` (little-endian ids) and `000000017.ends.bin` (little-endian
uint32: for each document that ends in the block, the offset right after its last token). A later
`000000017.mask.bin` (one byte a token, which of them count in the loss) may stand beside them; absent means all do.

This is the one module that loads webdataset, and only in processes that write: importing it takes more than a second.
"""

import hashlib
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from headrace.commit import FileEntry

TAR_RECORD = 512
MEMBER_MODE = 0o444


@dataclass(frozen=True)
class BlockEntry:
    """Where one block lies: what makes random reading possible without opening the tar."""

    shard: str
    """File name of the tar."""
    offset: int
    """Byte of the tar at which the ids begin; a multiple of 512."""
    tokens: int
    ends_offset: int
    """Byte of the tar at which the document ends begin."""
    documents: int
    """Documents that end in the block."""
    sha256: str
    """Digest of the bytes of the ids followed by those of the ends."""

    def to_json(self) -> dict[str, Any]:
        """Return the entry as it stands in a unit's commit."""
        return asdict(self)


class ShardWriter:
    """Writes the blocks of one split of one unit; tars are closed when they have reached `shard_bytes`."""

    def __init__(self, folder: Path, split: str, dtype: str, block_tokens: int, shard_bytes: int) -> None:
        self.files: dict[str, FileEntry] = {}
        self.blocks: list[BlockEntry] = []
        self._folder = folder
        self._split = split
        self._shard_bytes = shard_bytes
        self._block = np.zeros(block_tokens, dtype=dtype)
        self._largest = int(np.iinfo(dtype).max)
        self._used = 0
        self._ends: list[int] = []
        self._tar: _Tar | None = None

    def add_document(self, ids: npt.ArrayLike) -> None:
        """Append the ids of one whole document, its end token included. Raises OverflowError for one that is too large.

        Numpy would cut such an id down to a wrong one without a word.
        """
        given = np.asarray(ids)
        if given.size and int(given.max()) > self._largest:
            raise OverflowError(f"token id {given.max()} does not fit the type {self._block.dtype} of the dataset")
        array = given.astype(self._block.dtype)
        while array.size:
            taken = min(array.size, self._block.size - self._used)
            self._block[self._used : self._used + taken] = array[:taken]
            self._used += taken
            array = array[taken:]
            if not array.size:
                self._ends.append(self._used)
            if self._used == self._block.size:
                self._write_block()

    def close(self) -> None:
        """Write the last, shorter block and close the tar."""
        if self._used:
            self._write_block()
        self._close_tar()

    def abandon(self) -> None:
        """Let go of the open file, if there is one, after a failure."""
        if self._tar is not None:
            self._tar.abandon()
            self._tar = None

    def _write_block(self) -> None:
        if self._tar is None:
            number = len(self.files)
            self._tar = _Tar(self._folder / f"{self._split}-{number:06d}.tar")
        ids = self._block[: self._used].tobytes()
        ends = np.asarray(self._ends, dtype="<u4").tobytes()
        offset, ends_offset = self._tar.add(len(self.blocks), ids, ends)
        self.blocks.append(
            BlockEntry(
                shard=self._tar.path.name,
                offset=offset,
                tokens=self._used,
                ends_offset=ends_offset,
                documents=len(self._ends),
                sha256=hashlib.sha256(ids + ends).hexdigest(),
            )
        )
        self._used = 0
        self._ends = []
        if self._tar.size >= self._shard_bytes:
            self._close_tar()

    def _close_tar(self) -> None:
        if self._tar is not None:
            self.files[self._tar.path.name] = self._tar.close()
            self._tar = None


class _Tar:
    """One tar file, hashed while it is written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = _HashingFile(path.open("xb"))
        # No owner, time 0 as an integer: a float would add a header to every member, and a clock would change bytes.
        self._writer = _tar_writer()(self._file, user="", group="", mode=MEMBER_MODE, mtime=0, encoder=False)

    @property
    def size(self) -> int:
        """Bytes written so far."""
        return int(self._writer.tarstream.offset)

    def add(self, number: int, ids: bytes, ends: bytes) -> tuple[int, int]:
        """Add one block, members in the order of their names; return where its ids and its ends begin."""
        ends_offset = self.size + TAR_RECORD
        offset = ends_offset + _padded(len(ends)) + TAR_RECORD
        self._writer.write({"__key__": f"{number:09d}", "ends.bin": ends, "tokens.bin": ids})
        return offset, ends_offset

    def close(self) -> FileEntry:
        """Write the end of the tar and return what a commit says about it."""
        self._writer.close()
        self._file.close()
        return self._file.entry()

    def abandon(self) -> None:
        """Close the file without the end of the tar."""
        self._file.close()


class _HashingFile:
    """A file for writing that knows the size and digest of what it was given."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._digest = hashlib.sha256()
        self._size = 0

    def write(self, data: bytes) -> int:
        self._digest.update(data)
        self._size += len(data)
        return self._file.write(data)

    def close(self) -> None:
        self._file.close()

    def entry(self) -> FileEntry:
        return FileEntry(self._size, self._digest.hexdigest())


def _padded(size: int) -> int:
    return -(-size // TAR_RECORD) * TAR_RECORD


def _tar_writer() -> Any:
    os.environ.setdefault("WDS_SECURE", "1")  # read when the library is imported: no commands inside URLs, no pickles
    import webdataset

    return webdataset.TarWriter
