"""A lock between processes of one machine, for what must not be set up twice at once; it ends with its process."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class FileLock:
    """A lock by the name of a file, which stays. Not for folders on a network."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Not inherited by children: a lock ends with the process that took it, not with whatever it started.
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def acquire(self) -> None:
        """Wait for the lock and take it."""
        fcntl.flock(self._file, fcntl.LOCK_EX)

    def try_acquire(self, *, shared: bool = False) -> bool:
        """Take the lock if that is possible at once; shared ones exclude only one that is not. Says whether it was."""
        try:
            fcntl.flock(self._file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def write(self, text: str) -> None:
        """Replace what the file says: who holds the lock, for those who look."""
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, text.encode("utf-8"), 0)

    def release(self) -> None:
        """Give the lock back and forget the file; may be called again."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock within the block."""
    lock = FileLock(path)
    try:
        lock.acquire()
        yield
    finally:
        lock.release()
