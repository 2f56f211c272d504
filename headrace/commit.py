"""The commit object: one small JSON document, written last and create-only, that makes a folder of files real.

    {"kind": "unit", "format_version": 1, "body": {...}, "files": {"train-000000.tar": {"size": ..., "sha256": ...}},
     "digest": "..."}

`digest` is the SHA-256 of the canonical JSON of everything else, so it covers every byte that the commit names. Readers
believe only the commit: a folder without one does not exist.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.digest import digest_json, sha256_bytes, sha256_file, short
from headrace.errors import CommitConflict, DamagedData, HeadraceError, NotFound
from headrace.storage import Storage, check_key, json_document

COMMIT_NAME = "COMMIT.json"
FORMAT_VERSION = 1


@dataclass(frozen=True)
class FileEntry:
    """What a commit says about one file."""

    size: int
    """Bytes."""

    sha256: str
    """Digest of the content."""

    @classmethod
    def of_bytes(cls, data: bytes) -> "FileEntry":
        """Return the entry of a file with this content."""
        return cls(len(data), sha256_bytes(data))

    @classmethod
    def of_file(cls, path: Path) -> "FileEntry":
        """Return the entry of a local file. Raises OSError as `open` does."""
        return cls(path.stat().st_size, sha256_file(path))


@dataclass(frozen=True)
class Commit:
    """A commit object as written, or as read and verified."""

    kind: str
    """What the folder holds: unit, dataset, tokenizer, checkpoint, evaluation, export."""

    format_version: int
    body: dict[str, Any]
    """What the writer of this kind says about the content; JSON values only."""

    files: dict[str, FileEntry] = field(default_factory=dict)
    """By name relative to the commit's folder."""

    digest: str = ""
    """SHA-256 over everything above."""

    def document(self) -> dict[str, Any]:
        """Return the JSON document as it lies on the store."""
        return {**_content(self.kind, self.format_version, self.body, self.files), "digest": self.digest}


def write_commit(
    storage: Storage,
    prefix: str,
    *,
    kind: str,
    body: Mapping[str, Any],
    files: Mapping[str, FileEntry],
    name: str = COMMIT_NAME,
) -> Commit:
    """Commit the files that already lie below `prefix`, in one create-only write; return the commit.

    An identical commit that is there already counts as success: the answer to an earlier try was lost, or the same
    work was done twice. Raises CommitConflict when a different one is there, ValueError when the body is not JSON.
    """
    for file in files:
        check_key(file)
    content = _content(kind, FORMAT_VERSION, body, files)
    data = json_document({**content, "digest": digest_json(content)})
    commit = _parse(json.loads(data))  # as readers will see it: a tuple in the body is a list there
    key = _join(prefix, name)
    if not storage.create(key, data):
        existing = read_commit(storage, prefix, kind=kind, name=name)
        if existing is None or existing.digest != commit.digest:
            found = short(existing.digest) if existing else "none"
            raise CommitConflict(
                f"{storage.url(key)} already holds another {kind} (commit {found}, ours is {short(commit.digest)}). "
                "Nothing was overwritten; the same inputs must give the same files, so one of the two writers is wrong."
            )
    return commit


def read_commit(storage: Storage, prefix: str, *, kind: str, name: str = COMMIT_NAME) -> Commit | None:
    """Return the verified commit below `prefix`, or None when there is none.

    Raises DamagedData when it is not a complete commit, its digest does not match, or it is of another kind, and
    HeadraceError when it was written by a newer version. Does not look at the files: see `check_files`.
    """
    key = _join(prefix, name)
    try:
        document = storage.read_json(key)
    except NotFound:
        return None
    except DamagedData as error:
        raise DamagedData(f"{str(error).rstrip('.')}. Move it away and run again.") from error
    _check_version(storage.url(key), document)
    try:
        commit = _parse(document)
        content = {part: value for part, value in document.items() if part != "digest"}
        matches = digest_json(content) == commit.digest
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DamagedData(
            f"{storage.url(key)} is not a commit object ({error!r}). Move it away and run again."
        ) from error
    if not matches:
        raise DamagedData(
            f"{storage.url(key)} was changed after it was written: its content does not have the digest "
            f"{short(commit.digest)} that it names. Move it away and run again."
        )
    if commit.kind != kind:
        raise DamagedData(f"{storage.url(key)} commits a {commit.kind!r}, but a {kind!r} was expected there.")
    return commit


def check_files(storage: Storage, prefix: str, commit: Commit, *, content: bool) -> None:
    """Check that all files of a commit are there with their sizes and, with `content`, with their digests.

    Raises DamagedData that names the first file that is missing or differs.
    """
    sizes = storage.sizes(prefix) if len(commit.files) > 1 else {}
    for name, entry in commit.files.items():
        key = _join(prefix, name)
        size = sizes.get(key)
        if size is None:
            # A listing may lag behind on some servers; the object itself decides.
            size = storage.size(key) if storage.exists(key) else None
        if size is None:
            raise DamagedData(f"{storage.url(key)} is missing, but its commit names it ({entry.size:,} bytes).")
        if size != entry.size:
            raise DamagedData(f"{storage.url(key)} has {size:,} bytes, but its commit says {entry.size:,}.")
        if content and storage.sha256(key) != entry.sha256:
            raise DamagedData(
                f"{storage.url(key)} does not have the digest {short(entry.sha256)} that its commit says."
            )


def _check_version(url: str, document: Any) -> None:
    """Come before everything else: a newer version may look different everywhere else."""
    version = document.get("format_version") if isinstance(document, dict) else None
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise HeadraceError(
            f"{url} has format version {version}, but this headrace reads up to {FORMAT_VERSION}. Install a newer one."
        )


def _join(prefix: str, name: str) -> str:
    return f"{prefix}/{name}" if prefix else name


def _content(kind: str, version: int, body: Mapping[str, Any], files: Mapping[str, FileEntry]) -> dict[str, Any]:
    entries = {name: {"size": entry.size, "sha256": entry.sha256} for name, entry in files.items()}
    return {"kind": kind, "format_version": version, "body": dict(body), "files": entries}


def _parse(document: dict[str, Any]) -> Commit:
    files = {
        name: FileEntry(size=int(entry["size"]), sha256=str(entry["sha256"]))
        for name, entry in document["files"].items()
    }
    return Commit(
        kind=str(document["kind"]),
        format_version=int(document["format_version"]),
        body=dict(document["body"]),
        files=files,
        digest=str(document["digest"]),
    )
