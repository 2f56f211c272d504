"""Build one unit: pieces of files -> documents -> ids -> tars, then publish, the commit last.

    read_documents -> batches -> Encoder -> [begin] ids [end] -> ShardWriter of train or validation
                                                              -> documents.bin (where each document came from)

The unit is built whole in a local folder; only then its files go to the store, and COMMIT.json goes last. A process
that dies anywhere leaves nothing that a reader believes.
"""

import errno
import logging
import struct
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from data_prep.plan import UnitPlan, describe_pieces
from data_prep.shards import ShardWriter
from data_prep.text import Document, read_documents, refuse
from data_prep.tokenizers import Encoder, Ids
from headrace.commit import Commit, FileEntry, write_commit
from headrace.errors import StorageFull
from headrace.faults import fault_point
from headrace.storage import Storage

logger = logging.getLogger(__name__)

KIND = "unit"
SPLITS = ("train", "validation")
BATCH_BYTES = 2**20
"""Text given to the tokenizer in one call."""

DOCUMENT_RECORD = struct.Struct("<IIQ")
"""One record of documents.bin: number of the input in the unit, tokens with begin and end, byte offset in the input."""


@dataclass
class Counts:
    """What one split of a unit, or of a dataset, holds."""

    documents: int = 0
    tokens: int = 0
    """Begin and end tokens included."""
    text_bytes: int = 0
    """UTF-8 bytes of text."""

    def add(self, other: "Counts") -> None:
        """Add the counts of another unit."""
        self.documents += other.documents
        self.tokens += other.tokens
        self.text_bytes += other.text_bytes


@dataclass(frozen=True)
class DatasetCounts:
    """What a dataset holds, and what was left out on the way."""

    splits: dict[str, Counts]
    """Of `train` and `validation`."""
    skipped: dict[str, int]
    """Documents left out, by reason."""

    @property
    def documents(self) -> int:
        """Documents in both splits."""
        return sum(counts.documents for counts in self.splits.values())

    @property
    def tokens(self) -> int:
        """Tokens in both splits, begin and end tokens included."""
        return sum(counts.tokens for counts in self.splits.values())


@dataclass
class UnitProgress:
    """What a unit has done so far, reported while it is built."""

    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0


@dataclass
class _SplitWriter:
    shards: ShardWriter
    counts: Counts = field(default_factory=Counts)
    documents: bytearray = field(default_factory=bytearray)


def unit_prefix(key: str) -> str:
    """Return where a unit lies on the store."""
    return f"units/{key}"


def build_unit(
    storage: Storage,
    unit: UnitPlan,
    encoder: Encoder,
    scratch: Path,
    report: Callable[[UnitProgress], None],
) -> Commit:
    """Build and publish one unit; building it again publishes the same bytes.

    Raises InputError for a document that must not be skipped or a file that changed, StorageFull when the scratch
    folder's disk has no room.
    """
    try:
        with tempfile.TemporaryDirectory(prefix=f"{unit.key[:12]}-", dir=scratch) as name:
            folder = Path(name)
            body, files = _write_files(unit, encoder, folder, report)
            for file in sorted(files):
                storage.put_file(folder / file, f"{unit_prefix(unit.key)}/{file}")
            fault_point("unit.before_commit", key=unit.key)
            return write_commit(storage, unit_prefix(unit.key), kind=KIND, body=body, files=files)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageFull(
                f"There is no room left below {scratch} to build a unit. Free space and run the same command again: "
                "units that are finished are kept."
            ) from error
        raise


def _write_files(
    unit: UnitPlan, encoder: Encoder, folder: Path, report: Callable[[UnitProgress], None]
) -> tuple[dict[str, Any], dict[str, FileEntry]]:
    layout = unit.layout
    writers = {
        split: _SplitWriter(ShardWriter(folder, split, unit.tokenizer.dtype, layout.block_tokens, layout.shard_bytes))
        for split in SPLITS
    }
    try:
        skipped = _fill(unit, encoder, writers, report)
        return _finish(unit, writers, skipped, folder)
    finally:
        for writer in writers.values():
            writer.shards.abandon()


def _fill(
    unit: UnitPlan, encoder: Encoder, writers: dict[str, _SplitWriter], report: Callable[[UnitProgress], None]
) -> Counter[str]:
    skipped: Counter[str] = Counter()
    progress = UnitProgress()
    for batch in _batches(_documents(unit, skipped)):
        encoded = encoder.encode([document.text for _, document in batch])
        for (number, document), ids in zip(batch, encoded, strict=True):
            split = "validation" if unit.split.is_validation(document.digest()) else "train"
            _add(writers[split], number, document, ids)
            progress.documents += 1
            progress.tokens += len(ids)
            progress.text_bytes += len(document.text)
        report(progress)
    return skipped


def _documents(unit: UnitPlan, skipped: Counter[str]) -> Iterator[tuple[int, Document]]:
    for number, piece in enumerate(unit.pieces):
        for found in read_documents(piece):
            if isinstance(found, Document):
                yield number, found
                continue
            if unit.on_error == "fail" and found.reason != "empty":
                raise refuse(piece, found)
            skipped[found.reason] += 1
            logger.info("Skipped %s, byte %s: %s.", piece.path, found.offset, found.detail)


def _batches(documents: Iterator[tuple[int, Document]]) -> Iterator[list[tuple[int, Document]]]:
    batch: list[tuple[int, Document]] = []
    size = 0
    for entry in documents:
        batch.append(entry)
        size += len(entry[1].text)
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _add(writer: _SplitWriter, number: int, document: Document, ids: Ids) -> None:
    writer.shards.add_document(ids)
    writer.documents += DOCUMENT_RECORD.pack(number, len(ids), document.offset)
    writer.counts.add(Counts(1, len(ids), len(document.text)))


def _finish(
    unit: UnitPlan, writers: dict[str, _SplitWriter], skipped: Counter[str], folder: Path
) -> tuple[dict[str, Any], dict[str, FileEntry]]:
    files: dict[str, FileEntry] = {}
    for split, writer in writers.items():
        writer.shards.close()
        files |= writer.shards.files
        if writer.counts.documents:
            name = f"{split}.documents.bin"
            (folder / name).write_bytes(writer.documents)
            files[name] = FileEntry.of_bytes(bytes(writer.documents))
    body = {
        "inputs": describe_pieces(unit.pieces),
        "config": unit.config(),
        "dtype": unit.tokenizer.dtype,
        "counts": {split: asdict(writer.counts) for split, writer in writers.items()},
        "skipped": dict(sorted(skipped.items())),
        "blocks": {split: [entry.to_json() for entry in writer.shards.blocks] for split, writer in writers.items()},
    }
    return body, files
