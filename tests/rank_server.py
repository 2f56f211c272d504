"""Ranks for tests, forked from one warm process: two of them meet in half a second instead of eight.

`RankServer` (in the test process) starts this file once as a program. That program imports torch and the engine, never
prefect, mlflow or s3fs, and forks the ranks of every job from itself. A job names a function of a test module by file
and name; each rank loads that file, joins a gloo group, calls the function and sends back what it returned.
"""

import contextlib
import importlib
import importlib.util
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

ROOT = Path(__file__).resolve().parent.parent
NEVER_IMPORTED = ("prefect", "mlflow", "s3fs")
WARM = ("numpy.random", "pytest", "torch.distributed.fsdp", "torch._dynamo", "training.main", "tests.training.toy")
"""Imported once, so that no rank has to; FSDP alone would load torch._dynamo at its first use."""


@dataclass(frozen=True)
class Job:
    """What one call of `run_ranks` asks for."""

    world_size: int
    file: str
    function: str
    arguments: tuple[Any, ...]
    directory: str
    seconds: float


class RankServer:
    """The warm process, as the tests see it."""

    def __init__(self) -> None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, cwd=ROOT
        )

    def run(self, world_size: int, function: Callable[..., Any], *arguments: Any, seconds: float = 60.0) -> list[Any]:
        """Call `function(world, *arguments)` on every rank of a new group; return their results in rank order.

        `function` must be defined at the top of a test module; arguments and results travel as pickles. Fails with the
        traceback of the rank that failed first.
        """
        directory = tempfile.mkdtemp(prefix="ranks-")
        try:
            job = Job(world_size, function.__code__.co_filename, function.__qualname__, arguments, directory, seconds)
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            _send(self._process.stdin, job)
            results, failure = _receive(self._process.stdout)
        finally:
            shutil.rmtree(directory, ignore_errors=True)
        if failure is not None:
            raise AssertionError(failure)
        return list(results)

    def close(self) -> None:
        """End the warm process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=10)
        self._process.stdout.close()


def serve() -> None:
    """Run the jobs that arrive on stdin until it is closed."""
    for name in WARM:
        importlib.import_module(name)
    import torch

    # Threads do not survive a fork: torch must not have started any in this process.
    torch.set_num_threads(1)
    wrong = [name for name in NEVER_IMPORTED if name in sys.modules]
    assert not wrong, f"the parent of the ranks imported {wrong}"
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    while True:
        try:
            job = _receive(sys.stdin.buffer)
        except EOFError:
            os._exit(0)  # an orderly end would take torch apart for seconds
        _send(answers, _run_job(job))


def _run_job(job: Job) -> tuple[list[Any], str | None]:
    pids = {_fork_rank(job, rank): rank for rank in range(job.world_size)}
    deadline = time.monotonic() + job.seconds
    failure: str | None = None
    while pids:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            rank = pids.pop(pid)
            if status != 0 and failure is None:
                failure = _describe(job, rank, os.waitstatus_to_exitcode(status))
                deadline = min(deadline, time.monotonic() + 2.0)
        elif time.monotonic() > deadline:
            failure = failure or f"ranks {sorted(pids.values())} did not end within {job.seconds:g} s"
            for left in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(left, signal.SIGKILL)
            deadline = float("inf")
        else:
            time.sleep(0.005)
    if failure is not None:
        return [], failure
    return [pickle.loads((Path(job.directory) / f"{rank}.result").read_bytes()) for rank in range(job.world_size)], None


def _describe(job: Job, rank: int, code: int) -> str:
    path = Path(job.directory) / f"{rank}.error"
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return f"rank {rank} of {job.world_size} left with {code}\n{text}"


def _fork_rank(job: Job, rank: int) -> int:
    pid = os.fork()
    if pid == 0:
        _rank(job, rank)
    return pid


def _rank(job: Job, rank: int) -> None:
    directory = Path(job.directory)
    code = 1
    try:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(job.world_size)}
        import torch.distributed as dist

        from training.parallel.world import meet

        dist.init_process_group(
            "gloo", init_method=f"file://{directory / 'meeting'}", rank=rank, world_size=job.world_size
        )
        # A rank that ends at once closes connections that another one is still making.
        dist.barrier()
        result = _load(job)(meet(), *job.arguments)
        (directory / f"{rank}.result").write_bytes(pickle.dumps(result))
        code = 0
    except BaseException:  # noqa: BLE001 - sent to the test, whatever it is
        (directory / f"{rank}.error").write_text(traceback.format_exc(), encoding="utf-8")
    finally:
        sys.stderr.flush()
        os._exit(code)


def _load(job: Job) -> Callable[..., Any]:
    spec = importlib.util.spec_from_file_location("test_module_of_a_rank", job.file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    function: Callable[..., Any] = getattr(module, job.function)
    return function


def _send(stream: BinaryIO | Any, message: Any) -> None:
    data = pickle.dumps(message)
    stream.write(len(data).to_bytes(8, "little") + data)
    stream.flush()


def _receive(stream: BinaryIO | Any) -> Any:
    header = stream.read(8)
    if len(header) < 8:
        raise EOFError
    return pickle.loads(stream.read(int.from_bytes(header, "little")))


if __name__ == "__main__":
    # Messages name their classes by module: it must have one name on both sides, and here it would be __main__.
    from tests import rank_server

    rank_server.serve()
