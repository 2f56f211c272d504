"""A large file goes to S3 in parts: a few at a time, each tried again by itself, published by the last request.

Memory is bounded by the parts that are under way. The file is read again for every try, so a try costs nothing but
itself. A process that is killed leaves an unfinished upload on the server, which no reader can see.
"""

import contextlib
import os
import secrets
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any, Protocol

from headrace.errors import HeadraceError, NotFound, StorageUnavailable
from headrace.patience import patiently

PART_BYTES = 32 << 20
PART_CONCURRENCY = 4
MAX_PARTS = 10_000
"""What S3 allows."""

WRITER = "headrace-writer"
"""User metadata of an object: a nonce of the call that made it."""

Sent = Callable[[int], None]
"""Is told how many bytes were sent since the last call."""


class Call(Protocol):
    """Runs one S3 operation on the object that is written; raises errors of headrace.errors."""

    def __call__(self, operation: str, size: int = 0, **arguments: Any) -> dict[str, Any]:
        """`size` in bytes extends the time that the operation may take."""
        ...


@dataclass(frozen=True)
class Part:
    """One piece of the file."""

    number: int
    start: int
    length: int


def parts_of(size: int, part_bytes: int) -> list[Part]:
    """The pieces of a file; larger ones when there would be more than S3 allows."""
    part_bytes = max(part_bytes, -(-size // MAX_PARTS))
    starts = range(0, size, part_bytes)
    return [Part(number, start, min(part_bytes, size - start)) for number, start in enumerate(starts, 1)]


def upload_parts(
    call: Call, local: Path, size: int, *, part_bytes: int, concurrency: int, until: float, on_sent: Sent
) -> None:
    """Upload the file; the object appears complete or not at all.

    A part is tried again while the store is away, until time.monotonic() is `until`. Raises what `call` raises; the
    unfinished upload is removed then, if the store answers.
    """
    nonce = secrets.token_hex(16)
    upload = patiently(lambda: str(call("create_multipart_upload", Metadata={WRITER: nonce})["UploadId"]), until)
    try:
        sent = _send(call, local, upload, parts_of(size, part_bytes), concurrency, until, on_sent)
        patiently(lambda: _complete(call, upload, sent, nonce), until)
    except BaseException as error:
        with contextlib.suppress(HeadraceError):
            call("abort_multipart_upload", UploadId=upload)
        if isinstance(error, NotFound):
            # Somebody removed it (a rule of the bucket, an operator): from the beginning then.
            raise StorageUnavailable(f"The unfinished upload disappeared from the store: {error}") from error
        raise


def _send(
    call: Call, local: Path, upload: str, parts: list[Part], concurrency: int, until: float, on_sent: Sent
) -> list[dict[str, Any]]:
    """What the server needs to know of each part, in order."""
    stop = Event()

    def send(part: Part) -> dict[str, Any]:
        def once() -> dict[str, Any]:
            if stop.is_set():
                raise _Stopped("Another part of the same file failed.")
            data = os.pread(file.fileno(), part.length, part.start)
            return call("upload_part", part.length, UploadId=upload, PartNumber=part.number, Body=data)

        answer = patiently(once, until)
        on_sent(part.length)
        return {"PartNumber": part.number, "ETag": answer["ETag"]}

    with local.open("rb") as file, ThreadPoolExecutor(concurrency, thread_name_prefix="part") as pool:
        futures = [pool.submit(send, part) for part in parts]
        try:
            ended, _ = wait(futures, return_when=FIRST_EXCEPTION)
            for future in ended:
                future.result()
        except BaseException:
            stop.set()
            pool.shutdown(wait=True, cancel_futures=True)
            raise
        return [future.result() for future in futures]


def _complete(call: Call, upload: str, sent: list[dict[str, Any]], nonce: str) -> None:
    """Publish the object. Raises NotFound when there is no such upload."""
    try:
        call("complete_multipart_upload", UploadId=upload, MultipartUpload={"Parts": sent})
    except NotFound:
        # The answer to an earlier try may have been lost: then the upload is gone, and the object is ours.
        if call("head_object").get("Metadata", {}).get(WRITER) != nonce:
            raise


class _Stopped(HeadraceError):
    """Ends the other parts of a file that failed; handled where it is raised."""
