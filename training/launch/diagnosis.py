"""Why an attempt ended: the root cause among all that the ranks, torchrun and the agent saw.

One rank's end closes the connections of all others, so most errors of a failed attempt are echoes. The order is: what
the agent itself decided (a hang), a rank that was killed by a signal, the earliest real exception, and an echo only
when there is nothing else.
"""

import json
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from headrace import errors
from headrace.config import Part
from headrace.errors import AttemptFailed, HeadraceError, Terminal
from training.health.rewind import Rewind
from training.launch.hang import Beat
from training.run_spec import AttemptSpec, RankResult

_LAST_LINES_BYTES = 64 << 10


class AttemptOutcome(Part):
    """How one attempt ended; `outcome.json` of its work directory."""

    kind: Literal["finished", "stopped", "failed"]
    message: str = Field(description="one sentence; for a failure its root cause")
    step: int | None = Field(None, description="completed steps of the rank in question")
    rank: int | None = Field(None, description="the rank that failed first")
    error_kind: str | None = Field(None, description="class of the error, when failed")
    retryable: bool = Field(True, description="whether another attempt may succeed, when failed")
    log: str | None = Field(None, description="the rank's log file")

    def error(self) -> HeadraceError | None:
        """The failure as the error to raise; None when the attempt did not fail."""
        if self.kind != "failed":
            return None
        if self.error_kind == Rewind.__name__:
            return Rewind(self.message)
        if self.retryable:
            return AttemptFailed(self.message)
        kind = getattr(errors, self.error_kind or "", Terminal)
        if isinstance(kind, type) and issubclass(kind, HeadraceError) and not kind.retryable:
            return kind(self.message)
        return Terminal(self.message)


@dataclass(frozen=True)
class RankExit:
    """What torchrun saw of a rank that ended first."""

    rank: int
    exit_code: int
    """Negative: the signal that ended it."""
    time: float


def read_exits(path: Path) -> list[RankExit]:
    """The failures that torchrun listed; none when it did not get to write them."""
    try:
        listed = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return []
    return [RankExit(int(f["rank"]), int(f["exit_code"]), float(f["time"])) for f in listed]


def read_results(spec: AttemptSpec) -> list[RankResult]:
    """What the ranks of this attempt left behind; a rank that was killed left nothing."""
    results = []
    for rank in range(spec.run.launch.world_size):
        try:
            results.append(RankResult.model_validate_json(spec.result_path(rank).read_bytes()))
        except (FileNotFoundError, ValidationError):
            continue
    return results


def diagnose(
    spec: AttemptSpec,
    *,
    exits: Sequence[RankExit],
    results: Sequence[RankResult],
    beats: Mapping[int, Beat],
    torchrun_exit: int | None,
    stop_requested: bool,
    logs: Path,
    memory_kills: int = 0,
) -> AttemptOutcome:
    """The outcome of an attempt that the agent did not end for a reason of its own.

    `memory_kills` is how many processes of the machine the kernel killed meanwhile, for lack of memory.
    """
    world_size = spec.run.launch.world_size
    by_rank = {result.rank: result for result in results}
    for kind in ("finished", "stopped"):
        if len(results) == world_size and all(result.outcome == kind for result in results):
            step = max(result.step for result in results)
            done = "Finished" if kind == "finished" else "Stopped and saved"
            return AttemptOutcome(kind=kind, message=f"{done} at step {step}.", step=step)
    killed = [e for e in exits if e.rank not in by_rank]
    if stop_requested and all(result.outcome != "failed" or result.secondary for result in results):
        saved = [result.step for result in results if result.outcome == "stopped"]
        if saved:
            return AttemptOutcome(kind="stopped", message=f"Stopped and saved at step {max(saved)}.", step=max(saved))
        return AttemptOutcome(kind="stopped", message="Stopped before the state could be saved again.")
    if killed:
        first = min(killed, key=lambda e: (e.exit_code > 0, e.time))
        return _killed(first, beats.get(first.rank), logs, memory_kills)
    failed = [result for result in results if result.outcome == "failed"]
    if failed:
        return _failed(min(failed, key=lambda result: (result.secondary, result.time)), logs)
    return AttemptOutcome(kind="failed", message=_torchrun_ended(torchrun_exit, logs), error_kind="TorchrunEnded")


def memory_kills() -> int:
    """Processes that the kernel has killed for lack of memory since it started; 0 where it does not say."""
    try:
        lines = Path("/proc/vmstat").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


def _killed(end: RankExit, beat: Beat | None, logs: Path, killed_for_memory: int) -> AttemptOutcome:
    log = rank_log(logs, end.rank)
    where = f" after step {beat.step}, in phase {beat.phase!r}" if beat else " before its first sign"
    if end.exit_code < 0:
        kind = signal.Signals(-end.exit_code).name
        message = f"Rank {end.rank} was killed by {kind}{where}."
        if end.exit_code == -signal.SIGKILL and killed_for_memory:
            kind = "OutOfMemory"
            message = (
                f"Rank {end.rank} was killed{where}, when the kernel killed {killed_for_memory} processes of this "
                "machine for lack of memory: lower layout.micro_batch_size, or use more ranks."
            )
        elif end.exit_code == -signal.SIGKILL:
            message += " The kernel counted no kill for lack of memory, so somebody or something else did that."
    else:
        line = _last_line(log)
        said = f" Its last line: {line}" if line else ""
        message = f"Rank {end.rank} ended with exit code {end.exit_code}{where}, without saying why.{said}"
        kind = "UnexplainedExit"
    return AttemptOutcome(
        kind="failed",
        message=f"{message}{_see(log)}",
        step=beat.step if beat else None,
        rank=end.rank,
        error_kind=kind,
        log=str(log) if log else None,
    )


def _failed(result: RankResult, logs: Path) -> AttemptOutcome:
    log = rank_log(logs, result.rank)
    failure = f"Rank {result.rank} failed after step {result.step}: {result.error_kind}: {result.message}"
    echo = " (an echo: no rank said what happened first)" if result.secondary else ""
    return AttemptOutcome(
        kind="failed",
        # A rewind was decided by all ranks together: no rank failed, and no log says more.
        message=result.message if result.error_kind == Rewind.__name__ else f"{failure}{echo}{_see(log)}",
        step=result.step,
        rank=result.rank,
        error_kind=result.error_kind,
        # An error that is none of ours may be anything, also a machine's: the rule about progress bounds the attempts.
        retryable=result.retryable is not False,
        log=str(log) if log else None,
    )


def _torchrun_ended(exit_code: int | None, logs: Path) -> str:
    if exit_code is not None and exit_code < 0:
        return f"torchrun was killed by {signal.Signals(-exit_code).name}."
    line = _last_line(logs / "torchrun.log")
    return f"torchrun ended with exit code {exit_code} and no rank said why: {line or 'it wrote nothing'}."


def rank_log(logs: Path, rank: int) -> Path | None:
    """The file with what a rank wrote to stderr, wherever torchrun put it."""
    found = sorted(logs.glob(f"*/attempt_0/{rank}/stderr.log"))
    return found[-1] if found else None


def _see(log: Path | None) -> str:
    return f" Log: {log}" if log else ""


def _last_line(log: Path | None) -> str:
    if log is None or not log.is_file():
        return ""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _LAST_LINES_BYTES))
        lines = file.read().decode("utf-8", errors="replace").splitlines()
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
