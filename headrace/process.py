"""Processes on Linux: who descends from whom, and ending them for certain.

torchrun starts every rank in a session of its own, so a signal to a process group misses the ranks. The agent
therefore becomes a *child subreaper* (orphans among its descendants become its children, not init's) and ends its
descendants one by one, by process id. A process id alone is not an identity: it may be used again. The pair of process
id and start time is, so signals go through a pidfd whose start time was checked after it was opened.
"""

import contextlib
import ctypes
import logging
import os
import signal
import socket
import time
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_POLL_SECONDS = 0.02
_KILL_WAIT_SECONDS = 10.0
"""How long SIGKILL may take: only a process stuck inside the kernel needs longer, and nothing can end that one."""


@dataclass(frozen=True)
class _Process:
    pid: int
    parent: int
    start_time: int
    state: str

    @property
    def alive(self) -> bool:
        return self.state not in "ZXx"


def set_parent_death_signal(sig: int, parent_pid: int | None = None) -> None:
    """Have the kernel send `sig` to this process when its parent ends.

    Pass `parent_pid` (as the parent knew itself) to cover the moment before this call: when the parent has already
    ended, `sig` is sent at once. The kernel watches the parent's *thread* that started this process, so start
    children from a thread that lives as long as the process. Raises OSError when the kernel refuses.
    """
    _prctl(_PR_SET_PDEATHSIG, int(sig))
    if parent_pid is not None and os.getppid() != parent_pid:
        os.kill(os.getpid(), sig)


def become_subreaper() -> None:
    """Make this process the parent of all its orphaned descendants. Raises OSError when the kernel refuses."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def start_time(pid: int) -> int | None:
    """Return the start time of a process in clock ticks since boot, or None when there is no such process."""
    process = _read(pid)
    return process.start_time if process else None


def pid_alive(pid: int, start_time: int | None = None) -> bool:
    """Return whether the process runs; a zombie does not, nor does a later process that got the same id."""
    process = _read(pid)
    if process is None or not process.alive:
        return False
    return start_time is None or process.start_time == start_time


def descendants(pid: int) -> list[int]:
    """Return the ids of all living processes below `pid`, nearest generation first."""
    return [process.pid for process in _living_descendants(pid)]


def kill_descendants(pid: int, grace_seconds: float) -> None:
    """End every process below `pid`: SIGTERM, up to `grace_seconds` of waiting, SIGKILL until none is left.

    Call it from `pid` itself after `become_subreaper()`: only then do processes whose parent ends meanwhile stay
    below it. Never signals `pid`, the caller, or process ids up to 1. Does not wait for exit statuses: whoever
    started a child still collects it. Logs an error when a process outlives SIGKILL by ten seconds.
    """
    known: dict[int, _Process] = {}
    _signal_all(_track(pid, known), signal.SIGTERM)
    deadline = time.monotonic() + grace_seconds
    while _track(pid, known) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)

    deadline = time.monotonic() + _KILL_WAIT_SECONDS
    while left := _track(pid, known):
        # Again in each round: a process may have started another one just before it was killed.
        _signal_all(left, signal.SIGKILL)
        if time.monotonic() > deadline:
            logger.error("Processes %s did not end after SIGKILL.", [process.pid for process in left])
            return
        time.sleep(_POLL_SECONDS)


def machine_id() -> str:
    """Return what must be equal for two processes to see each other's process ids: boot and process namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    return f"{socket.gethostname()}/{boot}/{os.readlink('/proc/self/ns/pid')}"  # noqa: PTH115 - not a path


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}, {value}): {os.strerror(number)}")


def _read(pid: int) -> _Process | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The second field is the command name in parentheses and may itself hold spaces and parentheses.
    fields = text[text.rindex(")") + 2 :].split()
    return _Process(pid=pid, parent=int(fields[1]), start_time=int(fields[19]), state=fields[0])


def _living_descendants(pid: int) -> list[_Process]:
    children: dict[int, list[_Process]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (process := _read(int(entry.name))):
            children.setdefault(process.parent, []).append(process)
    found: list[_Process] = []
    generation = [pid]
    while generation:
        # Zombies are walked through: a dead leader's threads may still have living children.
        below = [child for parent in generation for child in children.get(parent, [])]
        found.extend(child for child in below if child.alive)
        generation = [child.pid for child in below]
    return found


def _track(pid: int, known: dict[int, _Process]) -> list[_Process]:
    """Add today's descendants to `known`; return those of `known` that still live, wherever they hang now."""
    for process in _living_descendants(pid):
        if process.pid > 1 and process.pid not in (pid, os.getpid()):
            known[process.pid] = process
    for process in list(known.values()):
        if not pid_alive(process.pid, process.start_time):
            del known[process.pid]
    return list(known.values())


def _signal_all(processes: list[_Process], sig: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            _signal(process, sig)


def _signal(process: _Process, sig: signal.Signals) -> None:
    handle = os.pidfd_open(process.pid)
    try:
        # The handle now names one process for good; only here is the check of its identity not a race.
        if start_time(process.pid) == process.start_time:
            signal.pidfd_send_signal(handle, sig)
    finally:
        os.close(handle)
