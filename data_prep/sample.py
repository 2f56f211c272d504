"""The text that a tokenizer is trained on: pieces of the corpus chosen by a hash of their content."""

import codecs
import hashlib
from collections.abc import Iterable, Iterator

from data_prep.text import Document, Piece, cut, parse_line, read_documents, utf8_fault
from headrace.errors import InputError

CHUNK_BYTES = 2**20


def sample_texts(pieces: Iterable[Piece], sample_bytes: int) -> Iterator[str]:
    """Yield texts of about `sample_bytes` in all: the whole corpus if it is smaller, else chunks of it.

    A chunk is what begins within one nominal mebibyte of a file. Chunks are taken in the order of a hash of the file's
    digest and the chunk's number, and read in the order of the corpus: the same corpus gives the same sample.
    """
    pieces = list(pieces)
    chunks = [
        (piece, start, min(start + CHUNK_BYTES, piece.stop))
        for piece in pieces
        for start in range(piece.start, piece.stop, CHUNK_BYTES)
    ]
    if sum(piece.size for piece in pieces) > sample_bytes:
        chunks = _choose(chunks, sample_bytes)
    for piece, start, stop in chunks:
        for text in _read_chunk(piece, start, stop):
            yield from (part.decode("utf-8") for part in cut(text))


Chunk = tuple[Piece, int, int]


def _choose(chunks: list[Chunk], sample_bytes: int) -> list[Chunk]:
    order = sorted(range(len(chunks)), key=lambda number: _rank(chunks[number]))
    chosen: list[int] = []
    total = 0
    for number in order:
        if total >= sample_bytes:
            break
        _, start, stop = chunks[number]
        chosen.append(number)
        total += stop - start
    return [chunks[number] for number in sorted(chosen)]


def _rank(chunk: Chunk) -> bytes:
    piece, start, _ = chunk
    return hashlib.sha256(f"{piece.sha256}:{start - piece.start}".encode()).digest()


def _read_chunk(piece: Piece, start: int, stop: int) -> Iterator[bytes]:
    """Yield the texts of one chunk; what cannot be read is left out, whatever `on_error` says: units decide that."""
    if (start, stop) == (piece.start, piece.stop):
        yield from (found.text for found in read_documents(piece) if isinstance(found, Document))
    elif piece.text_field is not None:
        for offset, line in _lines(piece, start, stop):
            found = parse_line(line, offset, piece.text_field)
            if isinstance(found, Document):
                yield found.text
    else:
        text = b"".join(line for _, line in _lines(piece, start, stop))
        if text and utf8_fault(text, start) is None:
            yield text


def _lines(piece: Piece, start: int, stop: int) -> Iterator[tuple[int, bytes]]:
    """Yield the lines whose first byte lies in [start, stop), each with the byte at which it begins."""
    try:
        with piece.path.open("rb") as file:
            if start > piece.start:
                file.seek(start - 1)
                start = start - 1 + len(file.readline())
            else:
                file.seek(start)
            while start < stop:
                line = file.readline(piece.stop - start)
                if not line:
                    return
                yield start, line.removeprefix(codecs.BOM_UTF8) if start == 0 else line
                start += len(line)
    except OSError as error:
        raise InputError(f"The file {piece.path} cannot be read: {error.strerror}.") from error
