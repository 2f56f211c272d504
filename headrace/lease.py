"""An advisory lease: whoever holds it works, the others wait, and a dead holder is replaced.

It only avoids doing the same work twice. It cannot exclude two holders (a paused holder may wake up after it was
replaced), so nothing may rest on it for its correctness: results become real by create-only commits.

The lease is one small object. Its holder rewrites it with a rising beat; a waiter takes over when it has not changed
for `ttl` seconds of the waiter's own clock, or at once when the holder was a process of this machine that is gone.
"""

import contextlib
import functools
import json
import logging
import operator
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from headrace.errors import HeadraceError, NotFound
from headrace.process import machine_id, pid_alive, start_time
from headrace.storage import Storage, json_document

logger = logging.getLogger(__name__)

_BEATS_PER_TTL = 4


@dataclass(frozen=True)
class LeaseHolder:
    """Who holds a lease, as it lies on the store."""

    holder: str
    """Unique for each holding."""

    host: str
    machine: str
    """Equal machines see each other's process ids."""

    pid: int
    start_time: int | None
    beat: int

    @property
    def here(self) -> bool:
        """Whether the holder is, or was, a process of this machine: only then its process id says anything."""
        return self.machine == machine_id()

    @property
    def gone(self) -> bool:
        """Whether the holder is known to have ended: only this machine can know it."""
        return self.here and not pid_alive(self.pid, self.start_time)


@contextlib.contextmanager
def hold(
    storage: Storage,
    key: str,
    *,
    poll: float = 1.0,
    ttl: float = 30.0,
    on_wait: Callable[[LeaseHolder], None] | None = None,
) -> Iterator[None]:
    """Hold the lease at `key` during the block; wait for it first.

    `poll` and `ttl` are in seconds. `on_wait` is called once for every other holder that is waited for. Raises what
    the storage raises while waiting; a store that fails later only lets the lease run out.
    """
    mine = _new_holder()
    _acquire(storage, key, mine, poll, ttl, on_wait)
    with _kept(storage, key, mine, ttl):
        yield


@contextlib.contextmanager
def hold_if_free(storage: Storage, key: str, *, ttl: float = 30.0) -> Iterator[bool]:
    """Hold the lease during the block when nobody else does, and say so: nobody is waited for.

    A holder of another machine counts, however silent it is: to find that out takes `ttl` seconds.
    """
    mine = _new_holder()
    current = _read(storage, key)
    other = _decode(current) if current is not None else None
    if other is not None and other.gone:
        _remove(storage, key, functools.partial(operator.eq, current))
    if not storage.create(key, _encode(mine)):
        yield False
        return
    with _kept(storage, key, mine, ttl):
        yield True


def _new_holder() -> LeaseHolder:
    return LeaseHolder(
        holder=secrets.token_hex(16),
        host=socket.gethostname(),
        machine=machine_id(),
        pid=os.getpid(),
        start_time=start_time(os.getpid()),
        beat=0,
    )


@contextlib.contextmanager
def _kept(storage: Storage, key: str, mine: LeaseHolder, ttl: float) -> Iterator[None]:
    """Within the block the lease is rewritten; afterwards it is given back."""
    stop = threading.Event()
    thread = threading.Thread(
        target=_keep, args=(storage, key, mine, ttl / _BEATS_PER_TTL, stop), name=f"lease {key}", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        _release(storage, key, mine)


def read_holder(storage: Storage, key: str) -> LeaseHolder | None:
    """Return who holds the lease; None when nobody does, or when what lies there says nothing."""
    data = _read(storage, key)
    return _decode(data) if data is not None else None


def _acquire(
    storage: Storage,
    key: str,
    mine: LeaseHolder,
    poll: float,
    ttl: float,
    on_wait: Callable[[LeaseHolder], None] | None,
) -> None:
    seen: bytes | None = None
    seen_at = time.monotonic()
    waited_for: str | None = None
    while not storage.create(key, _encode(mine)):
        current = _read(storage, key)
        if current is None:
            continue
        if current != seen:
            seen, seen_at = current, time.monotonic()
        other = _decode(current)
        expired = time.monotonic() - seen_at >= ttl
        if expired or (other is not None and other.gone):
            logger.info("The lease %s is taken over: its holder %s.", key, "stopped beating" if expired else "is gone")
            _remove(storage, key, functools.partial(operator.eq, current))
            continue
        if other is not None and on_wait is not None and other.holder != waited_for:
            waited_for = other.holder
            on_wait(other)
        time.sleep(poll)


def _keep(storage: Storage, key: str, mine: LeaseHolder, interval: float, stop: threading.Event) -> None:
    beat = 0
    while not stop.wait(interval):
        try:
            current = _read(storage, key)
            if not _is(current, mine):
                logger.warning("The lease %s was taken over by another process; the work here goes on.", key)
                return
            beat += 1
            storage.write_bytes(key, _encode(replace(mine, beat=beat)))
        except HeadraceError as error:
            logger.warning("The lease %s could not be renewed: %s", key, error)


def _release(storage: Storage, key: str, mine: LeaseHolder) -> None:
    try:
        _remove(storage, key, lambda data: _is(data, mine))
    except HeadraceError as error:
        logger.warning("The lease %s could not be given back and will run out: %s", key, error)


def _remove(storage: Storage, key: str, condition: Callable[[bytes], bool]) -> None:
    """Remove the lease if it still is the one that is meant; between the look and the deed lies a small gap."""
    current = _read(storage, key)
    if current is not None and condition(current):
        storage.delete(key)


def _read(storage: Storage, key: str) -> bytes | None:
    try:
        return storage.read_bytes(key)
    except NotFound:
        return None


def _encode(holder: LeaseHolder) -> bytes:
    return json_document(asdict(holder))


def _decode(data: bytes) -> LeaseHolder | None:
    """Return the holder, or None for bytes that say nothing: they run out like any lease that does not change."""
    try:
        document: Any = json.loads(data)
        return LeaseHolder(**document)
    except (ValueError, TypeError):
        return None


def _is(data: bytes | None, mine: LeaseHolder) -> bool:
    found = _decode(data) if data is not None else None
    return found is not None and found.holder == mine.holder
