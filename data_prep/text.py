"""From the bytes of a file to documents: strict UTF-8, one document a file or one a line.

    bytes -> [byte order mark off] -> lines of jsonl, or the whole file -> Document | Rejected

Text is never repaired or normalised: a document is taken as it is or rejected with a reason. NUL and every other
character is kept. Text stays UTF-8 bytes here, because its digest and its length in bytes are what the split and
bits per byte are about.
"""

import codecs
import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

from data_prep.sources import FileFormat
from headrace.digest import sha256_bytes
from headrace.errors import InputError

PIECE_BYTES = 2**18
"""Longest piece given to the tokenizer in one go: its memory is about 140 bytes for each byte of text."""

# Before white space: after an ASCII letter or digit, after a CJK ideograph (U+5000 to U+8FFF), or, when it is a blank,
# after any visible ASCII character. See `cut` for why this is safe.
_SAFE_BREAK = re.compile(rb"[A-Za-z0-9](?=[ \r\n])|[!-~](?= )|[\xe5-\xe8][\x80-\xbf]{2}(?=[ \r\n])")


class Digest(Protocol):
    """What hashlib returns."""

    def update(self, data: bytes, /) -> None:
        """Take in more bytes."""


@dataclass(frozen=True)
class Piece:
    """The bytes [start, stop) of one file, as they were when the dataset was planned."""

    name: str
    """Relative name of the file in its input."""
    path: Path
    format: FileFormat
    text_field: str | None
    start: int
    stop: int
    sha256: str
    """Digest of these bytes."""

    @property
    def size(self) -> int:
        """Bytes in the piece."""
        return self.stop - self.start


@dataclass(frozen=True)
class Document:
    """One document: valid UTF-8, not empty."""

    text: bytes
    offset: int
    """Byte of the file at which the document (its jsonl line) begins."""

    def digest(self) -> str:
        """Return the SHA-256 of the text: what decides on which side of the split it falls."""
        return sha256_bytes(self.text)


@dataclass(frozen=True)
class Rejected:
    """What could not be taken, and why."""

    reason: str
    """A word under which it is counted, such as `invalid_utf8`."""
    detail: str
    offset: int
    """Byte of the file at which the fault lies."""


def read_documents(piece: Piece) -> Iterator[Document | Rejected]:
    """Yield the documents of a piece in order.

    Raises InputError when the file cannot be read, or when its bytes are no longer those that were planned (then
    everything already yielded has to be thrown away).
    """
    digest = hashlib.sha256()
    try:
        with piece.path.open("rb") as file:
            file.seek(piece.start)
            if piece.format == "jsonl":
                yield from _read_lines(file, piece, digest)
            else:
                data = file.read(piece.size)
                digest.update(data)
                yield _whole_file(data, piece.start)
    except OSError as error:
        raise InputError(f"The file {piece.path} cannot be read: {error.strerror}.") from error
    if digest.hexdigest() != piece.sha256:
        raise InputError(f"The file {piece.path} was changed while it was being prepared. Run the same command again.")


def _whole_file(data: bytes, offset: int) -> Document | Rejected:
    if data.startswith(codecs.BOM_UTF8):
        data = data[len(codecs.BOM_UTF8) :]
        offset += len(codecs.BOM_UTF8)
    fault = utf8_fault(data, offset)
    if fault:
        return fault
    return Document(data, offset) if data else Rejected("empty", "the file holds no text", offset)


def _read_lines(file: BinaryIO, piece: Piece, digest: Digest) -> Iterator[Document | Rejected]:
    offset = piece.start
    while offset < piece.stop:
        line = file.readline(piece.stop - offset)
        if not line:
            return
        digest.update(line)
        start = offset
        offset += len(line)
        if start == 0 and line.startswith(codecs.BOM_UTF8):
            line = line[len(codecs.BOM_UTF8) :]
            start = len(codecs.BOM_UTF8)
        if line.isspace() or not line:
            continue  # a blank line is no document
        assert piece.text_field is not None, f"{piece.name}: a jsonl piece names its text field"
        yield parse_line(line, start, piece.text_field)


def parse_line(line: bytes, offset: int, text_field: str) -> Document | Rejected:
    """Return the document of one jsonl line that begins at byte `offset` of its file."""
    try:
        # Decoded here: given bytes, json guesses UTF-16 or UTF-32 from zero bytes.
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return Rejected("invalid_utf8", f"byte {line[error.start]:#04x} is not UTF-8", offset + error.start)
    except (ValueError, RecursionError) as error:
        return Rejected("invalid_json", f"the line is not JSON ({error})", offset)
    if not isinstance(record, dict):
        return Rejected("not_an_object", f"the line is a JSON {type(record).__name__}, not an object", offset)
    if text_field not in record:
        fields = ", ".join(sorted(record)[:8])
        return Rejected("missing_text", f"the line has no field {text_field!r}; it has: {fields}", offset)
    text = record[text_field]
    if not isinstance(text, str):
        return Rejected("not_text", f"the field {text_field!r} is a {type(text).__name__}, not text", offset)
    if not text:
        return Rejected("empty", f"the field {text_field!r} is empty", offset)
    try:
        return Document(text.encode("utf-8"), offset)
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        return Rejected("lone_surrogate", f"the text holds half of a surrogate pair (\\u{code:04x})", offset)


def utf8_fault(data: bytes, offset: int) -> Rejected | None:
    """Return what is wrong with text that begins at byte `offset` of its file, or None.

    Checked in steps, so that a large document does not lie in memory twice.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("strict")
    for start in range(0, len(data), PIECE_BYTES):
        chunk = data[start : start + PIECE_BYTES]
        pending = len(decoder.getstate()[0])
        try:
            decoder.decode(chunk, final=start + PIECE_BYTES >= len(data))
        except UnicodeDecodeError as error:
            at = offset + start - pending + error.start
            return Rejected("invalid_utf8", f"byte {error.object[error.start]:#04x} is not UTF-8", at)
    return None


def cut(text: bytes, piece_bytes: int = PIECE_BYTES) -> Iterator[bytes]:
    """Cut a long text into pieces that a byte-level BPE turns into the same ids as the whole.

    Byte-level tokenizers first split text by a pattern and merge only inside the parts, so a cut is harmless where the
    pattern always splits and where it looks at nothing beyond. In the patterns of `tokenizers.cuts_are_safe`, white
    space stands only at the beginning of a part, or follows other white space, or is a line break after punctuation.
    So every pattern splits before a blank that follows a visible character, and before a line break that follows a
    letter or digit. (After a line break would not do: how white space is split depends on what follows it.)

    Pieces are as long as allowed; where no safe place is found within `piece_bytes`, the piece extends to the next
    one, or to the end.
    """
    start = 0
    while len(text) - start > piece_bytes:
        stop = _last_break(text, start, start + piece_bytes) or _next_break(text, start + piece_bytes - 1)
        if stop is None:
            break
        yield text[start:stop]
        start = stop
    yield text[start:] if start else text


def _last_break(text: bytes, start: int, limit: int) -> int | None:
    """Search backwards in growing windows: most text has a safe break within its last lines."""
    window = 2**12
    while True:
        low = max(start, limit - window)
        found = None
        for match in _SAFE_BREAK.finditer(text, low, limit + 1):
            found = match.end()
        if found is not None or low == start:
            return found
        window *= 8


def _next_break(text: bytes, start: int) -> int | None:
    match = _SAFE_BREAK.search(text, start)
    return match.end() if match else None


def refuse(piece: Piece, rejected: Rejected) -> InputError:
    """Return the error for a document that must not be skipped; it names the file and the byte."""
    return InputError(
        f"{piece.path}, byte {rejected.offset:,}: {rejected.detail}. "
        "Correct the file, or set `on_error: skip` to leave such documents out and count them."
    )
