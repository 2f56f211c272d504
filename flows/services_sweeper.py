"""Waits until `headrace up` is gone, then ends whatever is left of it.

    python -m flows.services_sweeper PID START_TIME

Usually nothing is left. After `kill -9` of `up`, its direct children end by themselves, but not those that MLflow and
the worker started: training processes get a moment to save, then everything is killed.
"""

import signal
import sys
import time

from flows.services_file import remove_record
from flows.services_marks import kill, mark_of, marked, send, top_flow_runs
from headrace.process import pid_alive

POLL_SECONDS = 0.2
GRACE_SECONDS = 5.0


def main() -> None:
    """Wait, then sweep."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # whatever ends `up` must not end this before
    pid, started = int(sys.argv[1]), int(sys.argv[2])
    while pid_alive(pid, started):
        time.sleep(POLL_SECONDS)
    mark = mark_of(pid, started)
    remove_record(pid, started)
    send(marked(mark, flow_runs=False) + top_flow_runs(mark), mark, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_SECONDS
    while marked(mark) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    kill(mark)


if __name__ == "__main__":
    main()
