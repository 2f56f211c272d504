"""From files to units: the pieces of work whose results are kept, found again, and shared between datasets.

    files -> digests -> [small file: bucket by its name | large jsonl: byte ranges] -> UnitPlan, one key each

A unit's key is the digest of everything that decides its bytes: names and contents of its pieces, the tokenizer, the
rules of this package. A file that did not change stays in its bucket when others come or go, so its unit is reused.
"""

import hashlib
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from data_prep.config import DataConfig
from data_prep.sources import SourceFile
from data_prep.split import Split
from data_prep.text import Piece
from data_prep.tokenizers import PinnedTokenizer
from headrace.digest import digest_json, sha256_bytes
from headrace.errors import InputError

LOGIC_VERSION = 1
"""Raise it when the same inputs would give other bytes: every unit is then built anew under a new key."""

BLOCK_TOKENS = 2**18
SHARD_BYTES = 128 * 2**20
_READ_BYTES = 2**20


@dataclass(frozen=True)
class Layout:
    """Sizes that decide the bytes of a unit."""

    block_tokens: int = BLOCK_TOKENS
    """Most tokens in one block; the last one of a split is shorter."""
    shard_bytes: int = SHARD_BYTES
    """A tar file is closed when it has reached this size."""


@dataclass(frozen=True)
class Group:
    """The pieces of one unit, before it is known what they are turned into."""

    position: str
    """Which bucket or which range this is, for people."""
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class UnitPlan:
    """Everything that decides the bytes of one unit, and where its inputs lie on this machine."""

    key: str
    pieces: tuple[Piece, ...]
    tokenizer: PinnedTokenizer
    on_error: str
    split: Split
    layout: Layout

    def config(self) -> dict[str, Any]:
        """Return what, beside the inputs, decides the bytes: stored in the commit, hashed into the key."""
        return _unit_config(self.tokenizer, self.on_error, self.split, self.layout)


def group(files: Iterable[SourceFile], data: DataConfig) -> list[Group]:
    """Read and hash every file, and return the groups: by input, then buckets by number, then ranges by name."""
    files = list(files)
    with ThreadPoolExecutor(max_workers=min(8, len(os.sched_getaffinity(0)))) as pool:
        pieces_of = list(pool.map(lambda file: _pieces(file, data.range_bytes), files))
    groups: list[Group] = []
    for index in range(len(data.inputs)):
        buckets: dict[int, list[Piece]] = {}
        ranges: list[Group] = []
        for file, pieces in zip(files, pieces_of, strict=True):
            if file.input_index != index:
                continue
            if _is_large(file, data.range_bytes):
                ranges.extend(Group(f"{file.name}[{piece.start}:{piece.stop}]", (piece,)) for piece in pieces)
            else:
                buckets.setdefault(bucket_of(file.name, data.num_buckets), []).extend(pieces)
        groups.extend(Group(f"bucket {number}", tuple(buckets[number])) for number in sorted(buckets))
        groups.extend(ranges)
    return groups


def bucket_of(name: str, num_buckets: int) -> int:
    """Return the bucket of a small file: a hash of its relative name, so no other file can move it."""
    return int.from_bytes(hashlib.sha256(name.encode("utf-8")).digest()[:8], "big") % num_buckets


def plan_units(
    groups: Iterable[Group], data: DataConfig, tokenizer: PinnedTokenizer, split: Split, layout: Layout
) -> list[UnitPlan]:
    """Return one unit for each group, in order."""
    units = []
    for pieces in (entry.pieces for entry in groups):
        own_split = split.only_for(pieces)
        config = _unit_config(tokenizer, data.on_error, own_split, layout)
        key = digest_json({"config": config, "inputs": describe_pieces(pieces)})
        units.append(UnitPlan(key, pieces, tokenizer, data.on_error, own_split, layout))
    return units


def describe_pieces(pieces: Iterable[Piece]) -> list[dict[str, Any]]:
    """Return the inputs of a unit as its commit lists them: names, not places on this machine."""
    return [
        {
            "path": piece.name,
            "format": piece.format,
            "text_field": piece.text_field,
            "start": piece.start,
            "stop": piece.stop,
            "size": piece.size,
            "sha256": piece.sha256,
        }
        for piece in pieces
    ]


def _unit_config(tokenizer: PinnedTokenizer, on_error: str, split: Split, layout: Layout) -> dict[str, Any]:
    return {
        "logic_version": LOGIC_VERSION,
        "tokenizer": {
            "digest": tokenizer.digest,
            "vocab_size": tokenizer.vocab_size,
            "eos_id": tokenizer.eos_id,
            "bos_id": tokenizer.bos_id,
        },
        "on_error": on_error,
        "validation_fraction": split.fraction,
        "promoted": sorted(split.promoted),
        "block_tokens": layout.block_tokens,
        "shard_bytes": layout.shard_bytes,
    }


def _is_large(file: SourceFile, range_bytes: int) -> bool:
    return file.format == "jsonl" and file.size > range_bytes


def _pieces(file: SourceFile, range_bytes: int) -> list[Piece]:
    """The whole file as one piece, or a large jsonl file cut at line starts, with the digest of each piece."""
    step = range_bytes if _is_large(file, range_bytes) else file.size
    try:
        with file.path.open("rb") as opened:
            spans = list(_hash_spans(iter(lambda: opened.read(_READ_BYTES), b""), step))
    except OSError as error:
        raise InputError(f"The file {file.path} cannot be read: {error.strerror}. Make it readable.") from error
    if sum(stop - start for start, stop, _ in spans) != file.size:
        raise InputError(f"The file {file.path} was changed while it was being read. Run the same command again.")
    spans = spans or [(0, 0, sha256_bytes(b""))]
    return [
        Piece(file.name, file.path, file.format, file.text_field, start, stop, digest) for start, stop, digest in spans
    ]


def _hash_spans(chunks: Iterator[bytes], step: int) -> Iterator[tuple[int, int, str]]:
    """Yield (start, stop, digest) of spans of about `step` bytes that begin at line starts.

    A line belongs to the span in which its first byte lies: span k begins at the first line start at or after byte
    k * step. A line longer than a span leaves no gap, only fewer spans.
    """
    digest = hashlib.sha256()
    position = start = 0
    boundary = step
    for chunk in chunks:
        used = 0
        while used < len(chunk):
            # The first line break at or after boundary - 1 ends the line before the next line start.
            found = chunk.find(b"\n", used + max(0, boundary - 1 - position))
            end = found + 1 if found >= 0 else len(chunk)
            digest.update(chunk[used:end])
            position += end - used
            used = end
            if found >= 0:
                yield start, position, digest.hexdigest()
                start = position
                digest = hashlib.sha256()
                boundary = (position // step + 1) * step
    if position > start:
        yield start, position, digest.hexdigest()
