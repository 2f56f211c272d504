"""torchrun, made to end with its parent and to say in a file which ranks failed.

    python -m training.torchrun PARENT_PID FAILURES_FILE <arguments of torch.distributed.run>

torchrun itself only prints a summary. Its list of failures (rank, exit code, time) is what tells a rank that was killed
from one that merely saw its connection closed. This module is not below `training.launch`, which loads no torch.
"""

import json
import os
import signal
import sys
from pathlib import Path

from headrace import faults
from headrace.process import set_parent_death_signal

PID_VARIABLE = "HEADRACE_TORCHRUN_PID"
"""Tells the ranks their parent's process id, so that one whose parent ended before it looked can know."""


def main() -> None:
    """Run torchrun; exit code 0 when every rank ended with 0, else 1."""
    set_parent_death_signal(signal.SIGKILL, parent_pid=int(sys.argv[1]))
    faults.register("torchrun")
    os.environ[PID_VARIABLE] = str(os.getpid())
    failures_file = Path(sys.argv[2])

    # Only here: loading torch takes seconds, in which this process would not notice that its parent ended.
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    try:
        run(parse_args(sys.argv[3:]))
    except ChildFailedError as error:
        failures = [
            {"rank": rank, "pid": failure.pid, "exit_code": failure.exitcode, "time": failure.timestamp}
            for rank, failure in error.failures.items()
        ]
        temporary = failures_file.with_suffix(".tmp")
        temporary.write_text(json.dumps(failures), encoding="utf-8")
        temporary.replace(failures_file)
        sys.exit(1)


if __name__ == "__main__":
    main()
