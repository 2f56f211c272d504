"""The one way to stored objects: a folder, an S3 bucket, or memory, with the same promises.

An object appears complete or not at all. Writing replaces in one step; creating succeeds for exactly one of many
writers. Listings are never cached. Every request is bounded in time, and every failure is an error of headrace.errors.

Nothing is ever streamed into S3 through an open file: leaving such a block by an exception would publish a truncated
object. Bytes go in one request, files in parts whose completion publishes them.
"""

import builtins
import contextlib
import hashlib
import json
import re
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

from headrace.digest import sha256_bytes, sha256_file
from headrace.errors import (
    ConfigError,
    DamagedData,
    HeadraceError,
    NotFound,
)
from headrace.faults import fault_point
from headrace.local_store import FileStore, MemoryStore
from headrace.s3_client import S3Client
from headrace.s3_store import S3Store
from headrace.temporary import is_temporary

MAX_CREATE_BYTES = 64 << 20
"""A created object goes in one request: some servers ignore the condition when parts are put together."""

_HASH_BYTES = 16 << 20
_MAX_KEY_BYTES = 900
_KEY_PART = re.compile(r"[A-Za-z0-9._=+@,~-]{1,255}")
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,61}[A-Za-z0-9]")


class _Store(Protocol):
    def size(self, key: str) -> int: ...
    def read(self, key: str, start: int = 0, length: int | None = None) -> bytes: ...
    def sizes(self, prefix: str) -> dict[str, int]: ...
    def children(self, prefix: str) -> list[str]: ...
    def write(self, key: str, data: bytes) -> None: ...
    def create(self, key: str, data: bytes) -> bool: ...
    def put_file(self, local: Path, key: str) -> None: ...
    def get_file(self, key: str, local: Path) -> None: ...
    def delete(self, key: str) -> None: ...
    def delete_prefix(self, prefix: str) -> None: ...


class Storage:
    """Objects below one root URL, named by keys: relative, '/'-joined, letters, digits and `._=+@,~-`.

    Safe to use from threads, after a fork, and to send to another process. Every method may raise StorageUnavailable
    (asking again may help), ConfigError (missing rights, wrong credentials, no such bucket) or StorageFull.
    """

    def __init__(self, root_url: str, store: _Store) -> None:
        self.root_url = root_url
        self._store = store

    @classmethod
    def open(cls, url: str | Path) -> "Storage":
        """Return the storage at a folder path, `file://`, `s3://bucket/prefix` or `memory://name`.

        Nothing is contacted or created yet. Raises ConfigError for a URL of another kind.
        """
        text = str(url)
        scheme, separator, rest = text.partition("://")
        if not separator:
            return cls._open_folder(text)
        if scheme == "file":
            parts = urlsplit(text)
            if parts.netloc not in ("", "localhost") or parts.query or parts.fragment:
                raise ConfigError(
                    "A file URL must look like file:///absolute/path, without host, query or fragment. Write it so, or "
                    "give a plain path."
                )
            return cls._open_folder(unquote(parts.path))
        if scheme == "s3":
            return cls._open_bucket(rest)
        if scheme == "memory":
            name = rest.strip("/")
            return cls(f"memory://{name}", MemoryStore(f"memory://{name}"))
        raise ConfigError(
            f"Storage of kind {scheme!r} is not supported. Use a folder path, file://, s3:// or memory://."
        )

    @classmethod
    def _open_folder(cls, path: str) -> "Storage":
        if not path or "\0" in path:
            raise ConfigError(f"{path!r} is no folder path. Give the folder in which objects should lie.")
        root = Path(path).expanduser().absolute()
        return cls(root.as_uri(), FileStore(root))

    @classmethod
    def _open_bucket(cls, rest: str) -> "Storage":
        bucket, _, prefix = rest.partition("/")
        if not _BUCKET.fullmatch(bucket):
            # The URL itself is not repeated: credentials may have been written into it.
            raise ConfigError(
                "An S3 URL must look like s3://bucket/prefix, without credentials, port or query in it. Credentials "
                "and the endpoint come from the environment (AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL, ...)."
            )
        prefix = prefix.strip("/")
        try:
            root = f"{bucket}/{check_key(prefix)}" if prefix else bucket
        except ValueError:
            raise ConfigError(
                f"The prefix of s3://{bucket}/... cannot be used: parts between slashes must have 1 to 255 letters, "
                "digits or ._=+@,~-, and there is no query."
            ) from None
        return cls(f"s3://{root}", S3Store(root, S3Client()))

    def __repr__(self) -> str:
        """Name the root; it holds no secrets."""
        return f"Storage({self.root_url!r})"

    def __reduce__(self) -> tuple[Callable[[str], "Storage"], tuple[str]]:
        """Travel to another process as the URL alone: connections cannot."""
        return Storage.open, (self.root_url,)

    def url(self, key: str = "") -> str:
        """Return the URL of a key, or of the root."""
        if not key:
            return self.root_url
        path = self.local_path(key)
        return path.as_uri() if path else f"{self.root_url}/{key}"

    def local_path(self, key: str = "") -> Path | None:
        """Return the path of a key (or of the root) when the storage is a folder, else None."""
        if key:
            check_key(key)
        return self._store.path(key) if isinstance(self._store, FileStore) else None

    @property
    def is_s3(self) -> bool:
        """Whether the objects lie on S3: files reach it over a network, in parts."""
        return isinstance(self._store, S3Store)

    def exists(self, key: str) -> bool:
        """Return whether there is such an object. A folder of objects is not an object."""
        try:
            self.size(key)
        except NotFound:
            return False
        return True

    def size(self, key: str) -> int:
        """Return the size in bytes. Raises NotFound."""
        return self._store.size(check_key(key))

    def read_bytes(self, key: str) -> bytes:
        """Return the whole object. Raises NotFound."""
        return self._store.read(check_key(key))

    def read_range(self, key: str, start: int, length: int) -> bytes:
        """Return exactly `length` bytes from offset `start`. Raises NotFound, and DamagedData when there are fewer."""
        if start < 0 or length < 0:
            raise ValueError(f"start and length must not be negative, but are {start} and {length}")
        data = self._store.read(check_key(key), start, length) if length else b""
        if len(data) != length:
            raise DamagedData(
                f"{self.url(key)} is shorter than its index says: {length:,} bytes were expected from offset "
                f"{start:,}, but only {len(data):,} are there. The file is truncated or was replaced."
            )
        return data

    def read_json(self, key: str) -> Any:
        """Return the object as parsed JSON. Raises NotFound, and DamagedData when it is not JSON."""
        data = self.read_bytes(key)
        try:
            return json.loads(data)
        except ValueError as error:  # also covers text that is not UTF-8
            raise DamagedData(f"{self.url(key)} is not a complete JSON document ({error}).") from error

    def sha256(self, key: str) -> str:
        """Return the digest of the object, read in pieces. Raises NotFound."""
        path = self.local_path(key)
        size = self.size(key)
        if path is not None:
            return sha256_file(path)
        if size <= _HASH_BYTES:
            return sha256_bytes(self.read_bytes(key))
        total = hashlib.sha256()
        for start in range(0, size, _HASH_BYTES):
            total.update(self.read_range(key, start, min(_HASH_BYTES, size - start)))
        return total.hexdigest()

    def list(self, prefix: str = "") -> builtins.list[str]:
        """Return the sorted keys of all objects below the folder `prefix`, at any depth; none is no error."""
        return sorted(self.sizes(prefix))

    def sizes(self, prefix: str = "") -> dict[str, int]:
        """Return the size in bytes of every object below the folder `prefix`, by key."""
        return self._store.sizes(_check_prefix(prefix))

    def children(self, prefix: str = "") -> builtins.list[str]:
        """Return the sorted names directly below the folder `prefix`: objects, and folders that hold objects."""
        return sorted(self._store.children(_check_prefix(prefix)))

    def write_bytes(self, key: str, data: bytes) -> None:
        """Write the object, replacing an older one in one step."""
        fault_point("storage.write", key=check_key(key))
        self._store.write(key, data)

    def write_json(self, key: str, document: Any) -> None:
        """Write a JSON value as `json_document` encodes it, replacing an older one in one step."""
        self.write_bytes(key, json_document(document))

    def create(self, key: str, data: bytes) -> bool:
        """Write the object if there is none. Return True when this call made it, False when one exists.

        Of any number of writers at the same time exactly one gets True, provided that the store honours create-only
        writes (`probe_create_only`). After StorageUnavailable the object may or may not have been made by this call.
        """
        if len(data) > MAX_CREATE_BYTES:
            raise ValueError(f"{key}: a created object may have {MAX_CREATE_BYTES:,} bytes, but got {len(data):,}")
        fault_point("storage.write", key=check_key(key))
        return self._store.create(key, data)

    def put_file(self, local: Path, key: str) -> None:
        """Copy a local file to the object, replacing an older one in one step.

        Raises FileNotFoundError for a missing local file.
        """
        fault_point("storage.write", key=check_key(key))
        self._store.put_file(local, key)

    def upload(self, local: Path, key: str, *, until: float, on_sent: Callable[[int], None]) -> None:
        """As `put_file`, on S3 only, but patient: what fails because the store is away is tried again.

        That ends when time.monotonic() is `until`. `on_sent` is told how many bytes were sent since its last call,
        and may be called from other threads.
        """
        assert isinstance(self._store, S3Store)
        self._store.upload(local, check_key(key), until=until, on_sent=on_sent)

    def get_file(self, key: str, local: Path) -> None:
        """Copy the object to a local file, which appears complete or not at all. Raises NotFound."""
        self._store.get_file(check_key(key), local)

    def delete(self, key: str) -> None:
        """Remove the object; a missing one is no error."""
        self._store.delete(check_key(key))

    def delete_prefix(self, prefix: str) -> None:
        """Remove every object below the folder `prefix`; the root itself is refused with ValueError."""
        if not prefix:
            raise ValueError("delete_prefix() needs a prefix: an empty one would remove the whole store")
        self._store.delete_prefix(check_key(prefix))

    def abort_uploads(self, prefix: str, is_stale: Callable[[str], bool]) -> int:
        """Remove what killed processes left of uploads below the folder `prefix`; return how many were removed.

        It is not visible as an object, but takes room on S3. `is_stale` is asked with the key of each; there are none
        on other stores.
        """
        if not isinstance(self._store, S3Store):
            return 0
        return self._store.abort_uploads(_check_prefix(prefix), is_stale)

    def remove_abandoned(self, prefix: str) -> int:
        """Remove what ended processes of this machine left of writes below the folder `prefix`; return how many files.

        Only folders have such files, hidden from listings. Those of a process that runs, or that another machine knows,
        are left alone.
        """
        return self._store.remove_abandoned(_check_prefix(prefix)) if isinstance(self._store, FileStore) else 0

    def probe_create_only(self) -> None:
        """Check with a scratch object that the second of two create-only writes is refused.

        Raises ConfigError when it is not: on such a store two writers could both believe that their commit counts.
        """
        key = f"probes/{secrets.token_hex(8)}"
        try:
            first = self.create(key, b"first")
            second = self.create(key, b"second")
            kept = self.read_bytes(key)
        finally:
            with contextlib.suppress(HeadraceError):
                self.delete(key)
        if not first or second or kept != b"first":
            raise ConfigError(
                f"The store at {self.root_url} does not honour create-only writes (If-None-Match), so two writers "
                "could both commit. Use an unversioned bucket on a server that does (AWS S3, Ceph RGW), or a folder."
            )


def check_key(key: str) -> str:
    """Return `key` if it is a valid name for an object, else raise ValueError with the reason."""
    for part in key.split("/"):
        if part in (".", "..") or not _KEY_PART.fullmatch(part) or is_temporary(part):
            raise ValueError(
                f"{key!r} is not a valid key: parts between slashes must have 1 to 255 letters, digits or ._=+@,~-, "
                f"but one is {part!r}"
            )
    if len(key) > _MAX_KEY_BYTES:
        raise ValueError(f"a key may have {_MAX_KEY_BYTES} characters, but {key[:60]!r}... has {len(key)}")
    return key


def json_document(document: Any) -> bytes:
    """Return the one encoding of stored JSON documents: sorted keys, indented by one, a final newline, no NaN."""
    text = json.dumps(document, sort_keys=True, indent=1, ensure_ascii=False, allow_nan=False)
    return (text + "\n").encode("utf-8")


def _check_prefix(prefix: str) -> str:
    return check_key(prefix) if prefix else prefix
