"""Names of files that are being written, and which of them nobody will finish.

    .headrace-tmp-<machine>-<process id>-<its start time>-<nonce>

A process that is killed leaves its file behind. The name says whose it was, and only the machine that gave the process
id can say whether that process still runs: files of other machines, and of this one before its last start, are left
alone.
"""

import functools
import os
import re
import secrets

from headrace.digest import sha256_bytes, short
from headrace.process import machine_id, pid_alive, start_time

PREFIX = ".headrace-tmp-"
_NAME = re.compile(re.escape(PREFIX) + r"(?P<machine>[0-9a-f]{16})-(?P<pid>\d+)-(?P<started>\d+)-[0-9a-f]{32}")


def new_name() -> str:
    """A name that no other file has."""
    return f"{PREFIX}{_writer(os.getpid())}-{secrets.token_hex(16)}"


def is_temporary(name: str) -> bool:
    """Whether the file is hidden from listings."""
    return name.startswith(PREFIX)


def is_abandoned(name: str) -> bool:
    """Whether the name is one that `new_name` gave to a process of this machine that has ended."""
    match = _NAME.fullmatch(name)
    if match is None or match["machine"] != _machine():
        return False
    return not pid_alive(int(match["pid"]), int(match["started"]))


@functools.lru_cache(maxsize=1)
def _writer(pid: int) -> str:
    """This process, by its id: a child that was forked asks again."""
    return f"{_machine()}-{pid}-{start_time(pid)}"


@functools.cache
def _machine() -> str:
    return short(sha256_bytes(machine_id().encode()), 16)
