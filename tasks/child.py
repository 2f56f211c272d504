"""Processes that end when this one ends, whatever ends it; and stages that run in such a process.

    python -m tasks.child PARENT_PID SIGNAL MODULE ARGUMENTS

A heavy stage has a process of its own, so that the flow's process never loads torch. It tells its progress as JSON
lines on standard output; the last one is the result, or `error` and `retryable`. What it logs is on standard error.
"""

import json
import logging
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from headrace.errors import AttemptFailed, InputError, Terminal
from headrace.process import set_parent_death_signal

logger = logging.getLogger(__name__)

GRACE_SECONDS = 10.0
"""How long a child may take to end when it is asked to."""

Report = Callable[[dict[str, Any]], None]


def command_of(module: str, *arguments: str, end: signal.Signals = signal.SIGKILL) -> list[str]:
    """The command that runs `python -m module arguments` and gets the signal `end` when this process ends."""
    return [sys.executable, "-m", "tasks.child", str(os.getpid()), end.name, module, *arguments]


def run_module(module: str, spec: Mapping[str, Any], *, folder: Path, on_report: Report) -> dict[str, Any]:
    """Run `python -m module SPEC.json` to its end and return the last thing it reported.

    Raises AttemptFailed when the child was killed or failed in a way that another try may cure, and Terminal or
    InputError, as its exit code says, otherwise. No child is left when this function is left by an exception.
    """
    folder.mkdir(parents=True, exist_ok=True)
    spec_file = folder / "spec.json"
    spec_file.write_text(json.dumps(spec, indent=1), encoding="utf-8")
    log = folder / "log.txt"
    command = command_of(module, str(spec_file))
    with log.open("wb") as errors:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors)
    try:
        assert child.stdout is not None
        last = _follow(child.stdout, on_report)
        child.wait()
    finally:
        _end(child)
    if child.returncode == 0:
        return last
    raise _failure(module, child.returncode, last, log)


def _follow(lines: IO[bytes], on_report: Report) -> dict[str, Any]:
    last: dict[str, Any] = {}
    for line in lines:
        try:
            report = json.loads(line)
        except ValueError:
            continue  # a library that prints is no reason to fail
        if isinstance(report, dict):
            last = report
            on_report(report)
    return last


def _end(child: "subprocess.Popen[bytes]") -> None:
    if child.poll() is None:
        child.terminate()
        try:
            child.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
    if child.stdout is not None:
        child.stdout.close()


def _failure(module: str, code: int, last: dict[str, Any], log: Path) -> Exception:
    if code < 0:
        reason = f"was killed by {signal.Signals(-code).name}"
        if code == -signal.SIGKILL:
            reason += " (if nobody did that, by the kernel for lack of memory)"
        return AttemptFailed(f"{module} {reason}. Log: {log}")
    reason = str(last.get("error") or _last_line(log))
    message = f"{module} failed: {reason} Log: {log}"
    if last.get("retryable"):
        return AttemptFailed(message)
    return InputError(reason) if code == InputError.exit_code else Terminal(message)


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing."


def main() -> None:
    """Become the module."""
    parent_pid, end, module, *arguments = sys.argv[1:]
    set_parent_death_signal(signal.Signals[end], int(parent_pid))
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
