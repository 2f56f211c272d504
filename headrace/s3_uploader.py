"""Uploads in a process of their own, so that neither the interpreter's lock nor the cores of the caller are shared.

The caller computes; the upload process reads the file, sends it in parts, and is nice about it. It holds no more than
a few parts in memory and never loads torch.
"""

import json
import os
import select
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from headrace import errors, faults
from headrace.errors import HeadraceError, StorageUnavailable

MODULE = "headrace.s3_upload_process"
GRACE_SECONDS = 10.0
"""How long beyond its time an upload may take to say that it failed, before its process is killed."""


class Uploader:
    """Uploads files to one store through a process of its own; one file at a time."""

    def __init__(self, root_url: str) -> None:
        self._root_url = root_url
        self._process: subprocess.Popen[bytes] | None = None
        self._unread = b""
        self._lock = threading.Lock()

    @property
    def pid(self) -> int | None:
        """Id of the process while there is one."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    def start(self) -> None:
        """Start the process unless it runs; returns before it is ready.

        Call it from a thread that lives as long as this process: the kernel ends the child with that thread.
        """
        if self.pid is not None:
            return
        self.close()
        # Faults are planned for the caller: it is the one that a test wants to see killed or failing.
        environment = {name: value for name, value in os.environ.items() if name != faults.ENVIRONMENT_VARIABLE}
        self._unread = b""
        self._process = subprocess.Popen(
            [sys.executable, "-m", MODULE, str(os.getpid()), self._root_url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )

    def upload(self, local: Path, key: str, *, until: float) -> None:
        """Upload the file; what fails because the store is away is tried again until time.monotonic() is `until`.

        Raises what the storage raises, and StorageUnavailable when the process ends or does not end in time; a later
        `start` then begins another one.
        """
        with self._lock:
            seconds = until - time.monotonic()
            self._ask({"path": str(local), "key": key, "seconds": seconds})
            sent = 0
            while True:
                answer = self._answer(until + GRACE_SECONDS)
                if answer is None:
                    self._kill()
                    raise StorageUnavailable(
                        f"Cannot write {self._root_url}/{key}: {sent:,} of {local.stat().st_size:,} bytes were sent "
                        f"in {max(seconds, 0.0):.0f} s, and then the upload was given up. Check that the store is "
                        "reachable and fast enough."
                    )
                if "error" in answer:
                    raise _error(answer)
                if "done" in answer:
                    return
                sent += int(answer["sent"])

    def close(self) -> None:
        """End the process at once; nothing half-sent becomes visible."""
        if self._process is None:
            return
        self._kill()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            try:
                stream.close()
            except BrokenPipeError:
                continue
        self._process = None

    def _kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def _ask(self, request: dict[str, Any]) -> None:
        if self._process is None:
            raise StorageUnavailable("The upload process was not started.")
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise self._ended() from error

    def _answer(self, until: float) -> dict[str, Any] | None:
        """The next line that the process says; None when there is none in time."""
        assert self._process is not None
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        while b"\n" not in self._unread:
            ready, _, _ = select.select([descriptor], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                return None
            data = os.read(descriptor, 1 << 16)
            if not data:
                raise self._ended()
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _ended(self) -> StorageUnavailable:
        assert self._process is not None
        code = self._process.wait()
        return StorageUnavailable(
            f"The upload process ended with code {code} before the file was stored; what it said is in the log of "
            "this process. The next save starts another one."
        )


def _error(answer: dict[str, Any]) -> HeadraceError:
    kind = getattr(errors, str(answer["error"]), None)
    if not (isinstance(kind, type) and issubclass(kind, HeadraceError)):
        kind = StorageUnavailable  # a private kind of this module's other side
    return kind(str(answer["message"]))
