"""The event log of one attempt: lines in a local file, made durable as create-only segments on the store.

Rank 0 appends to the file and publishes before each commit; the supervisor follows the file; after a crash anybody may
open the file again and publish the rest. Readers go by `seq`, so a line that was published twice counts once.

    {"seq": 17, "time": 1790000000.123, "attempt": 3, "kind": "step", "step": 12, "loss": 2.31}

Numbers that JSON does not have (a loss that is not finite) are written as the strings "nan", "inf" and "-inf".
"""

import json
import logging
import math
import os
import threading
import time
from pathlib import Path
from typing import Any, Self

from headrace.errors import DamagedData
from headrace.local_store import explain_os_error
from headrace.storage import Storage

logger = logging.getLogger(__name__)

_RESERVED = ("seq", "time", "attempt", "kind")


class EventWriter:
    """Appends events to the local file of an attempt and publishes them. Safe to use from threads."""

    def __init__(self, path: Path, attempt: int) -> None:
        """Open the file, making it or going on after its last complete line; a torn last line is removed."""
        self.attempt = attempt
        self._path = path
        self._append_lock = threading.Lock()
        self._publish_lock = threading.Lock()
        self._pending = _take_up(path)
        self._seq = _last_seq(self._pending)
        self._segment: int | None = None
        self._file = path.open("ab", buffering=0)

    def append(self, kind: str, /, **fields: Any) -> dict[str, Any]:
        """Append one event and hand it to the operating system; return it.

        Raises ValueError for a reserved field, TypeError for a value that JSON does not have, and StorageFull when the
        disk is full; the file then is as before.
        """
        for name in _RESERVED:
            if name in fields:
                raise ValueError(f"an event's fields may not be named {', '.join(_RESERVED)}, but one is {name!r}")
        with self._append_lock:
            event = {"seq": self._seq + 1, "time": time.time(), "attempt": self.attempt, "kind": kind, **fields}
            event = {name: _encodable(value) for name, value in event.items()}
            line = json.dumps(event, ensure_ascii=False, allow_nan=False).encode("utf-8") + b"\n"
            self._write(line)
            self._seq += 1
            self._pending.append((self._seq, line))
        return event

    def publish(self, storage: Storage, run_prefix: str) -> None:
        """Upload the lines that are not on the store yet as one segment; nothing to do when there are none.

        May be repeated after any failure, also by another process that opened the same file.
        """
        with self._publish_lock:
            if self._segment is None:
                self._find_published(storage, run_prefix)
            while lines := self._unpublished():
                key = _segment_key(run_prefix, self.attempt, self._segment or 0)
                data = b"".join(line for _, line in lines)
                if storage.create(key, data):
                    self._drop_published(lines[-1][0])
                else:
                    # Made by an earlier try whose answer was lost, or by another process: take what it holds.
                    self._drop_published(_last_seq(_numbered(storage.read_bytes(key), storage.url(key))))
                self._segment = (self._segment or 0) + 1

    def close(self) -> None:
        """Close the local file; what is not published stays there."""
        self._file.close()

    def __enter__(self) -> Self:
        """Close the file at the end of the block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the file; what is not published stays there."""
        self.close()

    def _write(self, line: bytes) -> None:
        """Write the whole line or nothing; unbuffered, so that nothing of a refused line comes out later."""
        end = os.fstat(self._file.fileno()).st_size
        written = 0
        try:
            while written < len(line):
                written += self._file.write(line[written:])
        except OSError as error:
            os.ftruncate(self._file.fileno(), end)
            raise explain_os_error(error, "append to", self._path, len(line)) from error

    def _find_published(self, storage: Storage, run_prefix: str) -> None:
        names = _segments(storage, run_prefix, self.attempt)
        if names:
            key = f"{run_prefix}/events/{names[-1]}"
            self._drop_published(_last_seq(_numbered(storage.read_bytes(key), storage.url(key))))
        self._segment = len(names)

    def _unpublished(self) -> list[tuple[int, bytes]]:
        with self._append_lock:
            return list(self._pending)

    def _drop_published(self, seq: int) -> None:
        with self._append_lock:
            self._pending = [entry for entry in self._pending if entry[0] > seq]


class EventTail:
    """Follows the local file of an attempt while another process appends to it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def new(self) -> list[dict[str, Any]]:
        """Return the events of the complete lines that appeared since the last call; none when there is no file yet."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        complete = data[: data.rfind(b"\n") + 1]
        self._offset += len(complete)
        return _parse(complete, str(self._path))


def read_events(storage: Storage, run_prefix: str, attempt: int) -> list[dict[str, Any]]:
    """Return the published events of an attempt by rising `seq`, each once. Raises DamagedData for a bad segment."""
    events: dict[int, dict[str, Any]] = {}
    for name in _segments(storage, run_prefix, attempt):
        key = f"{run_prefix}/events/{name}"
        for event in _parse(storage.read_bytes(key), storage.url(key)):
            events.setdefault(event["seq"], event)
    return [events[seq] for seq in sorted(events)]


def _segment_key(run_prefix: str, attempt: int, segment: int) -> str:
    return f"{run_prefix}/events/{attempt:04d}-{segment:06d}.jsonl"


def _segments(storage: Storage, run_prefix: str, attempt: int) -> list[str]:
    start = f"{attempt:04d}-"
    return [
        name for name in storage.children(f"{run_prefix}/events") if name.startswith(start) and name.endswith(".jsonl")
    ]


def _take_up(path: Path) -> list[tuple[int, bytes]]:
    """Return the complete lines of an existing file, and cut off what a killed writer left of its last one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    complete = data[: data.rfind(b"\n") + 1]
    if len(complete) < len(data):
        os.truncate(path, len(complete))
    return _numbered(complete, str(path))


def _numbered(data: bytes, source: str) -> list[tuple[int, bytes]]:
    lines = data.splitlines(keepends=True)
    return [(event["seq"], line) for event, line in zip(_parse(data, source), lines, strict=True)]


def _parse(data: bytes, source: str) -> list[dict[str, Any]]:
    try:
        events = [json.loads(line) for line in data.splitlines()]
        for event in events:
            event["seq"] + 0  # every event has its number
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedData(f"{source} holds a line that is no event ({error!r}).") from error
    return events


def _last_seq(lines: list[tuple[int, bytes]]) -> int:
    return max((seq for seq, _ in lines), default=0)


def _encodable(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, list | tuple):
        return [_encodable(item) for item in value]
    if isinstance(value, dict):
        return {name: _encodable(item) for name, item in value.items()}
    if not isinstance(value, str | int | float) and hasattr(value, "item"):
        return _encodable(value.item())  # a number of numpy or torch
    return value
