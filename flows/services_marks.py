"""Finding every process below an `up` for certain: by a variable that it gives to all it starts.

MLflow's server and Prefect's worker start processes of their own, which outlive them when they are killed. What was
inherited at the start of a process cannot be lost: neither by another parent nor by another session.
"""

import contextlib
import os
import signal
import time
from pathlib import Path

from headrace.process import pid_alive

UP = "HEADRACE_UP"
"""Process id and start time of the `up` that a process belongs to."""

SERVICE = "HEADRACE_SERVICE"
FLOW_RUN = "PREFECT__FLOW_RUN_ID"

POLL_SECONDS = 0.05
KILL_SECONDS = 10.0


def mark_of(pid: int, started: int) -> str:
    """The value of the variable for one `up`."""
    return f"{pid}.{started}"


def marked(mark: str, service: str | None = None, *, flow_runs: bool | None = None) -> list[int]:
    """Ids of the living processes of one `up`: of one service, and only with or only without flow runs."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (variables := _environment(int(entry.name))) and variables.get(UP) == mark:
            is_flow_run = FLOW_RUN in variables
            if service in (None, variables.get(SERVICE)) and flow_runs in (None, is_flow_run):
                found.append(int(entry.name))
    return [pid for pid in found if pid != os.getpid() and pid_alive(pid)]


def top_flow_runs(mark: str) -> list[int]:
    """Ids of the processes of flow runs, without those that they started."""
    inside = set(marked(mark, flow_runs=True))
    return [pid for pid in inside if _parent(pid) not in inside]


def send(pids: list[int], mark: str, number: signal.Signals) -> None:
    """Send a signal to those of these processes that still are the `up`'s."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, OSError):
            handle = os.pidfd_open(pid)
            try:
                if _environment(pid).get(UP) == mark:
                    signal.pidfd_send_signal(handle, number)
            finally:
                os.close(handle)


def kill(mark: str, service: str | None = None, *, flow_runs: bool | None = None) -> bool:
    """Kill until none is left; says whether that was so within ten seconds."""
    deadline = time.monotonic() + KILL_SECONDS
    while left := marked(mark, service, flow_runs=flow_runs):
        send(left, mark, signal.SIGKILL)
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_SECONDS)
    return True


def _environment(pid: int) -> dict[str, str]:
    try:
        text = Path(f"/proc/{pid}/environ").read_bytes().decode("utf-8", errors="replace")
    except OSError:
        return {}
    return dict(pair.split("=", 1) for pair in text.split("\0") if "=" in pair)


def _parent(pid: int) -> int:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0
    return int(text[text.rindex(")") + 2 :].split()[1])
