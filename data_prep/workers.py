"""Build units in other processes, and hear of their progress.

The processes are started anew (never forked: the parent may hold threads and connections) with one module of their
own, so they load neither the parent's main module nor anything it imported.
"""

import json
import logging
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from data_prep.plan import UnitPlan
from data_prep.tokenizers import Encoder, PinnedTokenizer, load_json
from data_prep.units import UnitProgress, build_unit
from data_prep.worker import TOKENIZER, UNIT
from headrace import errors
from headrace.errors import HeadraceError, Retryable
from headrace.storage import Storage

logger = logging.getLogger(__name__)

Report = Callable[[UnitPlan, UnitProgress, bool], None]
"""Called with a unit, what it has done so far, and whether it is committed now."""

_END = None


def build_units(
    storage: Storage,
    units: Sequence[UnitPlan],
    tokenizer: PinnedTokenizer,
    *,
    scratch: Path,
    processes: int,
    report: Report,
) -> None:
    """Build units until all are committed; `processes` at a time, in this process when it is one.

    The first failure ends the others and is raised: what `build_unit` raises, Retryable when a process was killed, or
    HeadraceError when it failed in another way. Units that were committed by then stay.
    """
    count = min(processes or len(os.sched_getaffinity(0)), len(units))
    if count <= 1 or storage.root_url.startswith("memory://"):  # other processes would have a memory of their own
        _build_here(storage, units, tokenizer, scratch, report)
        return
    setup = {
        "parent_pid": os.getpid(),
        "storage": storage.root_url,
        "scratch": str(scratch),
        "tokenizer": TOKENIZER.dump_python(tokenizer, mode="json"),
    }
    pool = _Pool(units, setup, count)
    built = 0
    try:
        for unit, message in pool.messages():
            _handle(unit, message, report)
            built += message["kind"] == "built"
    finally:
        pool.stop()
    assert built == len(units), f"{built} of {len(units)} units were built, but no process reported a fault"


def _build_here(
    storage: Storage, units: Sequence[UnitPlan], tokenizer: PinnedTokenizer, scratch: Path, report: Report
) -> None:
    if not units:
        return
    encoder = Encoder(load_json(storage, tokenizer.key), tokenizer.eos_id, tokenizer.bos_id)
    for unit in units:
        latest = UnitProgress()

        def remember(progress: UnitProgress, unit: UnitPlan = unit) -> None:
            nonlocal latest
            latest = progress
            report(unit, progress, False)

        build_unit(storage, unit, encoder, scratch, remember)
        report(unit, latest, True)


def _handle(unit: UnitPlan, message: dict[str, Any], report: Report) -> None:
    kind = message["kind"]
    progress = UnitProgress(message.get("documents", 0), message.get("tokens", 0), message.get("bytes", 0))
    if kind == "progress":
        report(unit, progress, False)
    elif kind == "built":
        report(unit, progress, True)
    elif kind == "error":
        raise getattr(errors, message["error"], HeadraceError)(message["message"])
    else:
        _raise_death(unit, message["exit_code"])


def _raise_death(unit: UnitPlan, exit_code: int) -> None:
    names = unit.pieces[0].name + (f" and {len(unit.pieces) - 1} more" if len(unit.pieces) > 1 else "")
    if exit_code < 0:
        raise Retryable(
            f"The process that tokenised {names} was killed by signal {-exit_code}. If memory ran out, lower "
            "data.processes. Finished units are kept: run the same command again."
        )
    raise HeadraceError(
        f"The process that tokenised {names} ended with exit code {exit_code}; its last words are on standard error."
    )


class _Pool:
    """Worker processes, each with a thread that feeds it and listens to it."""

    def __init__(self, units: Sequence[UnitPlan], setup: dict[str, Any], count: int) -> None:
        self._units = iter(units)
        self._lock = threading.Lock()
        self._messages: queue.Queue[tuple[UnitPlan, dict[str, Any]] | None] = queue.Queue()
        # Started here, not in the threads: the parent-death signal watches the thread that starts a process.
        self._processes = [_start() for _ in range(count)]
        self._threads = [
            threading.Thread(target=self._feed, args=(process, setup), daemon=True) for process in self._processes
        ]
        for thread in self._threads:
            thread.start()

    def messages(self) -> Iterator[tuple[UnitPlan, dict[str, Any]]]:
        """Yield what the workers say, until all of them are done."""
        running = len(self._threads)
        while running:
            message = self._messages.get()
            if message is _END:
                running -= 1
            else:
                yield message

    def stop(self) -> None:
        """End every process that still runs, and wait for it."""
        for process in self._processes:
            process.kill()
        for thread in self._threads:
            thread.join()
        for process in self._processes:
            process.wait()
            for stream in (process.stdin, process.stdout):
                _close(stream)

    def _feed(self, process: "subprocess.Popen[bytes]", setup: dict[str, Any]) -> None:
        try:
            first = json.dumps(setup).encode("utf-8") + b"\n"
            while (unit := self._next()) is not None:
                if not self._build(process, first, unit):
                    return
                first = b""
        finally:
            self._messages.put(_END)

    def _build(self, process: "subprocess.Popen[bytes]", first: bytes, unit: UnitPlan) -> bool:
        """Send a unit and pass on the answers; return whether the worker can take another."""
        assert process.stdin is not None, "started with a pipe"
        assert process.stdout is not None, "started with a pipe"
        try:
            process.stdin.write(first + UNIT.dump_json(unit) + b"\n")
            process.stdin.flush()
            for line in process.stdout:
                message = json.loads(line)
                self._messages.put((unit, message))
                if message["kind"] != "progress":
                    return bool(message["kind"] == "built")
        except BrokenPipeError:
            pass  # it died before it read the unit
        self._messages.put((unit, {"kind": "death", "exit_code": process.wait()}))
        return False

    def _next(self) -> UnitPlan | None:
        with self._lock:
            return next(self._units, None)


def _start() -> "subprocess.Popen[bytes]":
    root = str(Path(__file__).parents[1])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    # One thread of the tokenizer in each process: the processes already take the cores.
    environment = os.environ | {"PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "data_prep.worker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    )


def _close(stream: IO[bytes] | None) -> None:
    if stream is not None:
        try:
            stream.close()
        except BrokenPipeError:
            logger.debug("A worker ended before it read everything.")
