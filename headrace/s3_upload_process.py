"""The process that uploads the files of another one, at a lower priority.

    python -m headrace.s3_upload_process PARENT_PID s3://bucket/prefix

For each file it gets one JSON line: {"path": ..., "key": ..., "seconds": ...}. It answers with lines {"sent": bytes}
and at last {"done": true}, or {"error": a class of headrace.errors, "message": ...}. It ends when its input ends, and
is killed by the kernel when its parent ends. Credentials come from the environment, as everywhere.
"""

import json
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import IO, Any

from headrace.errors import HeadraceError
from headrace.local_store import explain_os_error
from headrace.patience import patiently
from headrace.process import set_parent_death_signal
from headrace.storage import Storage

NICENESS = 10
"""Whoever computes goes first: on a machine that is busy, uploads take what is left."""


class _Answers:
    """Lines to the parent, from any thread."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self._lock = threading.Lock()

    def say(self, **fields: Any) -> None:
        """Write one line."""
        with self._lock:
            self._stream.write(json.dumps(fields) + "\n")
            self._stream.flush()


def main() -> None:
    """Upload what is asked for, one file after the other."""
    parent_pid, root_url = int(sys.argv[1]), sys.argv[2]
    # A stop is for the parent, which may need this process for its last save.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    set_parent_death_signal(signal.SIGKILL, parent_pid)
    os.nice(NICENESS)
    form = "%(asctime)s upload process %(levelname)s %(name)s: %(message)s"
    logging.basicConfig(level=logging.WARNING, format=form, stream=sys.stderr)
    with os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8") as stream:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a library prints is no answer
        answers = _Answers(stream)
        storage = Storage.open(root_url)
        for line in sys.stdin:
            _upload(storage, json.loads(line), answers)


def _upload(storage: Storage, asked: dict[str, Any], answers: _Answers) -> None:
    path, until = Path(asked["path"]), time.monotonic() + asked["seconds"]

    def upload() -> None:
        storage.upload(path, asked["key"], until=until, on_sent=lambda size: answers.say(sent=size))

    try:
        patiently(upload, until)
    except HeadraceError as error:
        answers.say(error=type(error).__name__, message=str(error))
    except OSError as error:
        explained = explain_os_error(error, "read", path)
        answers.say(error=type(explained).__name__, message=str(explained))
    else:
        answers.say(done=True)


if __name__ == "__main__":
    main()
