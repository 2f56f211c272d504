"""Which documents are held out for validation: a function of the document's own text.

A document goes to validation when the first 64 bits of its SHA-256 lie below `fraction` of their range. So duplicates
fall on the same side, and no document changes sides when others are added.

A small corpus may have no, or almost no, document there. Then further documents are *promoted*: in the order of their
digests, until validation holds 16 KiB or a tenth of the text, never more than a third, and at least one document (the
smallest, where each is more than a third). Promoted documents are part of the key of the units that hold them, so a
unit stays a pure function of what its key digests.

To see whether a corpus is short of validation text, it is read until 16 KiB of it are found: at a fraction of 2 % that
is after about a megabyte.
"""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, replace

from data_prep.text import Document, Piece, read_documents, refuse
from headrace.errors import InputError

FLOOR_BYTES = 16 * 2**10
"""A corpus with this much validation text, and any training text, promotes nothing."""


@dataclass(frozen=True)
class Split:
    """The rule that sends each document to train or validation."""

    fraction: float
    promoted: frozenset[str] = frozenset()
    """Digests of the documents that go to validation although their hash does not say so."""

    def is_validation(self, digest: str) -> bool:
        """Return whether the document with this SHA-256 is held out."""
        return int(digest[:16], 16) < int(self.fraction * 2**64) or digest in self.promoted

    def only_for(self, pieces: Iterable[Piece]) -> "Split":
        """Return the same rule with the promoted documents of these pieces alone."""
        if not self.promoted:
            return self
        held = {document.digest() for piece in pieces for document in _documents(piece)}
        return replace(self, promoted=self.promoted & held)


def choose_split(pieces: Iterable[Piece], fraction: float, on_error: str) -> Split:
    """Return the split of a corpus.

    Raises InputError for a corpus without documents, with one distinct document only, or, when `on_error` is `fail`,
    with a document that cannot be read among those that were looked at.
    """
    split = Split(fraction)
    pieces = list(pieces)
    sizes: dict[str, int] = {}
    held = total = 0
    for document in itertools.chain.from_iterable(_documents(piece, on_error) for piece in pieces):
        digest, size = document.digest(), len(document.text)
        sizes[digest] = sizes.get(digest, 0) + size
        total += size
        held += size if split.is_validation(digest) else 0
        if FLOOR_BYTES <= held < total:
            return split
    if not sizes:
        raise InputError(empty_corpus(pieces))
    if len(sizes) == 1:
        raise InputError(
            f"The corpus has one distinct document only ({pieces[0].path}), so it cannot be split into training and "
            "validation. Give more files, or a jsonl file with one document a line."
        )
    return replace(split, promoted=_promote(split, sizes))


def empty_corpus(pieces: Iterable[Piece]) -> str:
    """Return the message for a corpus in which no document has any text."""
    paths = sorted({str(piece.path) for piece in pieces})
    return (
        f"The corpus is empty: none of its {len(paths)} files ({paths[0]}{', ...' if len(paths) > 1 else ''}) holds a "
        "document with text. Check `path`, `format` and `text_field` of the inputs."
    )


def _promote(split: Split, sizes: dict[str, int]) -> frozenset[str]:
    total = sum(sizes.values())
    held = sum(size for digest, size in sizes.items() if split.is_validation(digest))
    others = sorted(digest for digest in sizes if not split.is_validation(digest))
    promoted: set[str] = set()
    for digest in others:
        if held >= min(FLOOR_BYTES, total // 10) and held > 0:
            break
        if held + sizes[digest] <= total // 3:
            promoted.add(digest)
            held += sizes[digest]
    if held == 0:
        promoted.add(min(others, key=lambda digest: (sizes[digest], digest)))
    return frozenset(promoted)


def _documents(piece: Piece, on_error: str = "skip") -> Iterable[Document]:
    for found in read_documents(piece):
        if isinstance(found, Document):
            yield found
        elif on_error == "fail" and found.reason != "empty":
            raise refuse(piece, found)
