"""SHA-256 digests of bytes, files and JSON documents, always as lower-case hexadecimal."""

import hashlib
import json
from pathlib import Path
from typing import Any


def sha256_bytes(data: bytes | bytearray | memoryview) -> str:
    """Return the digest of `data`."""
    return hashlib.sha256(data).hexdigest()


def sha256_file(path: Path) -> str:
    """Return the digest of the file's content, read in pieces. Raises OSError as `open` does."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def canonical_json(obj: Any) -> bytes:
    """Return the one UTF-8 encoding of a JSON value: sorted keys, no spaces, no NaN, characters not escaped.

    Raises ValueError when the value has no such encoding: NaN or infinity, keys that are not strings (their order
    would change when the document is read back), or text that is not valid Unicode.
    """
    _check_keys(obj)
    text = json.dumps(obj, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8")


def digest_json(obj: Any) -> str:
    """Return the digest of the canonical encoding of a JSON value. Raises ValueError as `canonical_json` does."""
    return sha256_bytes(canonical_json(obj))


def short(digest: str, n: int = 12) -> str:
    """Return the first `n` characters, enough for people to tell digests apart."""
    return digest[:n]


def _check_keys(obj: Any) -> None:
    """Refuse keys that `json.dumps` would silently turn into strings."""
    if isinstance(obj, dict):
        for key, value in obj.items():
            if not isinstance(key, str):
                raise ValueError(f"JSON keys must be strings, but found {key!r} of type {type(key).__name__}")
            _check_keys(value)
    elif isinstance(obj, list | tuple):
        for value in obj:
            _check_keys(value)
