"""Objects below a prefix of an S3 bucket, in terms of single requests.

Knows what to ask of S3; the client library, its bounds and its process rules are handed in (`S3Client`).
"""

import contextlib
import functools
import random
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from headrace import s3_errors
from headrace.errors import NotFound, StorageUnavailable
from headrace.local_store import complete_file
from headrace.patience import patiently
from headrace.s3_parts import PART_BYTES, PART_CONCURRENCY, WRITER, Call, Sent, upload_parts

PAGE_KEYS = 1000
"""Keys in one answer to a listing and in one request to delete: what S3 allows."""

_ASSUMED_BYTES = 64 << 20
"""For the deadline of reading a whole object, whose size is not known before: what `create` may write, or less."""

_CREATE_TRIES = 3


class S3Client(Protocol):
    """Runs methods of the client library."""

    def run(self, method: str, *arguments: Any, size: int, **options: Any) -> Any:
        """Run `method` within a deadline that `size` (bytes) extends. Raises s3_errors.RequestFailed."""
        ...

    def run_here(self, operation: str, **arguments: Any) -> Any:
        """Run an S3 operation on the calling thread, without a deadline. Raises s3_errors.RequestFailed."""
        ...


class S3Store:
    """Objects below `root` ("bucket" or "bucket/prefix") through s3fs. Keys are given checked."""

    def __init__(self, root: str, client: S3Client) -> None:
        self._root = root
        self._bucket, _, prefix = root.partition("/")
        self._prefix = f"{prefix}/" if prefix else ""
        self._client = client

    def size(self, key: str) -> int:
        """Return the size in bytes. Raises NotFound."""
        return int(self._call("read", key, "head_object", Key=self._prefix + key)["ContentLength"])

    def read(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        """Return the bytes from `start`, at most `length` of them. Raises NotFound."""
        end = None if length is None else start + length
        part = {} if length is None and not start else {"start": start, "end": end}
        size = _ASSUMED_BYTES if length is None else length
        try:
            data: bytes = self._run("read", key, "_cat_file", f"{self._root}/{key}", size=size, **part)
        except s3_errors.RangeBeyondEnd:
            return b""
        return data

    def sizes(self, prefix: str) -> dict[str, int]:
        """Return the size of every object below the folder `prefix`, by key."""
        return {
            entry["Key"].removeprefix(self._prefix): int(entry["Size"])
            for page in self._pages(prefix)
            for entry in page.get("Contents", [])
            if not entry["Key"].endswith("/")  # "folders" made by consoles
        }

    def children(self, prefix: str) -> list[str]:
        """Return the names directly below the folder `prefix`."""
        found: set[str] = set()
        for page in self._pages(prefix, Delimiter="/"):
            found.update(entry["Key"] for entry in page.get("Contents", []))
            found.update(entry["Prefix"].removesuffix("/") for entry in page.get("CommonPrefixes", []))
        names = {key.rsplit("/", 1)[-1] for key in found}
        return sorted(names - {""})  # "folders" made by consoles end in a slash

    def write(self, key: str, data: bytes) -> None:
        """Write the object, replacing an older one."""
        self._run("write", key, "_pipe_file", f"{self._root}/{key}", data, size=len(data), **_parts())

    def create(self, key: str, data: bytes) -> bool:
        """Write the object if there is none; return whether this call made it."""
        # The client repeats a request whose answer was lost, and then meets its own object. The nonce in the
        # object's metadata tells whose it is, whatever the bytes are.
        nonce = secrets.token_hex(16)
        for attempt in range(_CREATE_TRIES):
            try:
                self._call(
                    "create",
                    key,
                    "put_object",
                    size=len(data),
                    Key=self._prefix + key,
                    Body=data,
                    IfNoneMatch="*",
                    Metadata={WRITER: nonce},
                )
                return True
            except s3_errors.ObjectExists:
                with contextlib.suppress(NotFound):  # removed meanwhile: try again
                    return self._writer(key) == nonce
            except s3_errors.WriteConflict:
                time.sleep(random.uniform(0.1, 0.5) * (attempt + 1))
        raise StorageUnavailable(f"Cannot create {self._url(key)}: other writers of the same key are in the way.")

    def put_file(self, local: Path, key: str) -> None:
        """Upload a local file; large ones go in parts, and the last step publishes them."""
        self._put(local, functools.partial(self._call, "write", key), key, until=0.0, on_sent=lambda _: None)

    def upload(self, local: Path, key: str, *, until: float, on_sent: Sent) -> None:
        """As `put_file`, trying again while the store is away, until time.monotonic() is `until`.

        One try may take longer: whoever calls this ends the process when it does.
        """

        def call(operation: str, size: int = 0, **arguments: Any) -> dict[str, Any]:
            try:
                answer: dict[str, Any] = self._client.run_here(operation, Bucket=self._bucket, **arguments)
            except s3_errors.RequestFailed as failure:
                raise s3_errors.explain(failure.error, "write", self._url(key), size) from failure.error
            return answer

        self._put(local, call, key, until=until, on_sent=on_sent)

    def _put(self, local: Path, run: Call, key: str, *, until: float, on_sent: Sent) -> None:
        call = functools.partial(run, Key=self._prefix + key)
        size = local.stat().st_size
        if size > PART_BYTES:
            upload_parts(
                call, local, size, part_bytes=PART_BYTES, concurrency=PART_CONCURRENCY, until=until, on_sent=on_sent
            )
        else:
            patiently(lambda: call("put_object", size, Body=local.read_bytes()), until)
            on_sent(size)

    def get_file(self, key: str, local: Path) -> None:
        """Download to a local file, which appears complete. Raises NotFound."""
        size = self.size(key)
        with complete_file(local, "write", size) as file:
            for start in range(0, size, PART_BYTES):
                file.write(self.read(key, start, min(PART_BYTES, size - start)))
            if file.tell() != size:
                raise StorageUnavailable(f"{self._url(key)} changed while it was read.")

    def delete(self, key: str) -> None:
        """Remove the object; a missing one is no error."""
        with contextlib.suppress(NotFound):
            self._call("delete", key, "delete_object", Key=self._prefix + key)

    def delete_prefix(self, prefix: str) -> None:
        """Remove every object below the folder `prefix`."""
        keys = [self._prefix + key for key in self.sizes(prefix)]
        for first in range(0, len(keys), PAGE_KEYS):
            batch = {"Objects": [{"Key": key} for key in keys[first : first + PAGE_KEYS]], "Quiet": True}
            answer = self._call("delete", prefix, "delete_objects", Delete=batch)
            if failed := answer.get("Errors"):
                raise StorageUnavailable(
                    f"Cannot delete {len(failed)} objects below {self._url(prefix)}: {failed[0].get('Code')}."
                )

    def abort_uploads(self, prefix: str, is_stale: Callable[[str], bool]) -> int:
        """Remove the unfinished uploads below the folder `prefix` whose key `is_stale` says yes to; return how many."""
        where = f"{self._prefix}{prefix}/" if prefix else self._prefix
        removed = 0
        more: dict[str, Any] = {}
        while True:
            page = self._call("list", prefix, "list_multipart_uploads", Prefix=where, **more)
            for upload in page.get("Uploads", []):
                if is_stale(upload["Key"].removeprefix(self._prefix)):
                    with contextlib.suppress(NotFound):  # finished or removed meanwhile
                        place = {"Key": upload["Key"], "UploadId": upload["UploadId"]}
                        self._call("delete", prefix, "abort_multipart_upload", **place)
                        removed += 1
            if not page.get("IsTruncated"):
                return removed
            more = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}

    def _url(self, key: str) -> str:
        return f"s3://{self._root}/{key}" if key else f"s3://{self._root}"

    def _writer(self, key: str) -> str | None:
        answer = self._call("read", key, "head_object", Key=self._prefix + key)
        nonce: str | None = answer.get("Metadata", {}).get(WRITER)
        return nonce

    def _pages(self, prefix: str, **options: Any) -> Iterator[dict[str, Any]]:
        where = f"{self._prefix}{prefix}/" if prefix else self._prefix
        while True:
            page = self._call("list", prefix, "list_objects_v2", Prefix=where, MaxKeys=PAGE_KEYS, **options)
            yield page
            if not page.get("IsTruncated"):
                return
            options["ContinuationToken"] = page["NextContinuationToken"]

    def _call(self, doing: str, key: str, operation: str, size: int = 0, **arguments: Any) -> dict[str, Any]:
        """Run one S3 operation on the bucket."""
        answer: dict[str, Any] = self._run(
            doing, key, "_call_s3", operation, size=size, Bucket=self._bucket, **arguments
        )
        return answer

    def _run(self, doing: str, key: str, method: str, *arguments: Any, size: int, **options: Any) -> Any:
        try:
            return self._client.run(method, *arguments, size=size, **options)
        except s3_errors.RequestFailed as failure:
            raise s3_errors.explain(failure.error, doing, self._url(key), size) from failure.error


def _parts() -> dict[str, int]:
    return {"chunksize": PART_BYTES, "max_concurrency": PART_CONCURRENCY}
