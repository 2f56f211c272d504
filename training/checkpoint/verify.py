"""Whether the bytes of a checkpoint are those of its commit: which file is not, and why.

No tensor is made and nothing is unpickled; no torch here.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

from headrace.commit import Commit, FileEntry, read_commit
from headrace.errors import DamagedData, HeadraceError, NotFound
from headrace.storage import Storage
from training.checkpoint.catalog import COMMIT_KIND, COMMIT_NAME, DAMAGED_NAME

_READ_BYTES = 16 << 20


class Stopped(HeadraceError):
    """Reading was ended by whoever asked for it; nothing is known of what was not read."""


@dataclass(frozen=True)
class Damage:
    """One file that is not what the commit says."""

    file: str
    reason: str


@dataclass(frozen=True)
class Finding:
    """What a look at one checkpoint found."""

    step: int
    attempt: int
    prefix: str
    damage: tuple[Damage, ...]
    num_files: int
    num_bytes: int
    """Of the files that its commit names; 0 when the commit itself cannot be read."""

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong with what was looked at."""
        return not self.damage


def inspect(
    storage: Storage,
    prefix: str,
    *,
    step: int,
    attempt: int,
    content: bool,
    on_bytes: Callable[[int], None] = lambda _: None,
) -> Finding:
    """Look at every file of a committed checkpoint and name all that are damaged, also when the first one is.

    Without `content` the commit's own digest and the sizes are checked; with it every byte is read. `on_bytes` is told
    how many bytes were read since its last call; it may raise to end the reading.
    """
    damage = _set_aside(storage, prefix)
    try:
        commit = _read(storage, prefix, step, attempt)
    except DamagedData as error:
        damage.append(Damage(COMMIT_NAME, str(error)))
        return Finding(step, attempt, prefix, tuple(damage), num_files=0, num_bytes=0)
    sizes = storage.sizes(prefix)
    for name, entry in sorted(commit.files.items()):
        reason = _wrong(storage, f"{prefix}/{name}", entry, sizes, on_bytes if content else None)
        if reason:
            damage.append(Damage(name, reason))
    num_bytes = sum(entry.size for entry in commit.files.values())
    return Finding(step, attempt, prefix, tuple(damage), num_files=len(commit.files), num_bytes=num_bytes)


def _set_aside(storage: Storage, prefix: str) -> list[Damage]:
    if not storage.exists(f"{prefix}/{DAMAGED_NAME}"):
        return []
    document = storage.read_json(f"{prefix}/{DAMAGED_NAME}")
    reason = document.get("reason", "no reason recorded")
    return [Damage(DAMAGED_NAME, f"set aside by attempt {document.get('found_by_attempt')}: {reason}")]


def _read(storage: Storage, prefix: str, step: int, attempt: int) -> Commit:
    commit = read_commit(storage, prefix, kind=COMMIT_KIND)
    if commit is None:
        raise DamagedData("it is missing")
    found = (commit.body.get("step"), commit.body.get("attempt"))
    if found != (step, attempt):
        raise DamagedData(f"it is the commit of step {found[0]}, attempt {found[1]}: copied here from another folder")
    return commit


def _wrong(
    storage: Storage, key: str, entry: FileEntry, sizes: dict[str, int], on_bytes: Callable[[int], None] | None
) -> str:
    """What is wrong with a file; nothing when all is well."""
    try:
        # A listing may lag behind on some servers; the object itself decides.
        size = sizes[key] if sizes.get(key) == entry.size else storage.size(key)
        if size != entry.size:
            return f"it has {size:,} bytes, but the commit says {entry.size:,}"
        if on_bytes is not None and _sha256(storage, key, entry.size, on_bytes) != entry.sha256:
            return "its content is not that of the commit (SHA-256 differs)"
    except NotFound:
        return f"it is missing; the commit names it with {entry.size:,} bytes"
    except DamagedData as error:
        return str(error)
    return ""


def _sha256(storage: Storage, key: str, size: int, on_bytes: Callable[[int], None]) -> str:
    digest = hashlib.sha256()
    for start in range(0, size, _READ_BYTES):
        data = storage.read_range(key, start, min(_READ_BYTES, size - start))
        digest.update(data)
        on_bytes(len(data))
    return digest.hexdigest()
