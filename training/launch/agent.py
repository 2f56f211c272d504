"""The agent of one attempt on one machine: starts torchrun, watches everything, leaves nothing alive.

    python -m training.launch.agent PARENT_PID <work_dir>/attempt.json

A process of its own, in a session of its own, so that it outlives whatever happens to the flow's process for as long as
it takes to clean up. The chain of custody:

    the flow's process dies    the agent sees it within half a second and ends every descendant
    the agent dies             the kernel kills torchrun, and then the ranks (parent-death signals)
    torchrun dies              the kernel kills the ranks; what escapes becomes the agent's child (subreaper)
    a rank dies or hangs       torchrun or the agent ends the others; one attempt, no restart inside

Ends by writing `outcome.json`. No torch here: the agent starts in a fraction of a second.
"""

import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

from headrace import faults
from headrace.process import become_subreaper, descendants, kill_descendants, start_time
from training.launch.diagnosis import AttemptOutcome, diagnose, memory_kills, read_exits, read_results
from training.launch.hang import Hang, HangDetector
from training.launch.machine import FILE_NAME as MACHINE_NAME
from training.launch.machine import MachineLog
from training.launch.stacks import collect_stacks, stack_path, tell_stacks
from training.run_spec import AttemptSpec, read_attempt

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.2
SHUTDOWN_SECONDS = 5
"""How long torchrun waits for the other ranks after one ended, before it kills them."""

KILL_GRACE_SECONDS = 1.0
"""Between asking the last processes to end and killing them; they had their time before."""

STOPPED_EARLY = "Stopped before the ranks had started; nothing is lost."

OUTCOME_NAME = "outcome.json"
PROCESSES_NAME = "processes.json"


class Agent:
    """Runs one attempt on this machine."""

    def __init__(self, spec: AttemptSpec, attempt_file: Path, parent_pid: int) -> None:
        self._spec = spec
        self._attempt_file = attempt_file
        self._parent_pid = parent_pid
        self._logs = spec.work_path / "logs"
        self._failures_file = spec.work_path / "failures.json"
        self._stop_since: float | None = None
        self._stop_passed_on = False
        self._seen: dict[int, int | None] = {os.getpid(): start_time(os.getpid())}
        """Start times of the processes of this attempt, by id."""
        self._memory_kills = memory_kills()
        self._machine = MachineLog(spec.work_path / MACHINE_NAME, spec.attempt)
        self._detector = HangDetector(
            {rank: spec.heartbeat_path(rank) for rank in range(spec.run.launch.world_size)},
            start_step=spec.restore.step if spec.restore else 0,
            hang_timeout_seconds=spec.run.launch.hang_timeout_seconds,
            save_timeout_seconds=spec.run.checkpoint.save_timeout_seconds,
            now=time.monotonic(),
        )

    def request_stop(self, signum: int, frame: FrameType | None) -> None:  # noqa: ARG002 - a signal handler
        """Let the ranks save and end; after the grace time they are killed."""
        if self._stop_since is None:
            self._stop_since = time.monotonic()

    def run(self) -> AttemptOutcome:
        """Start the ranks, watch them to their end, and say how it went."""
        torchrun = self.start_torchrun()
        try:
            verdict = self._watch(torchrun)
        finally:
            kill_descendants(os.getpid(), KILL_GRACE_SECONDS)
        torchrun.wait()
        if verdict is not None:
            return verdict
        self._detector.look(time.monotonic())  # what they said last
        return diagnose(
            self._spec,
            exits=read_exits(self._failures_file),
            results=read_results(self._spec),
            beats=self._detector.beats(),
            torchrun_exit=torchrun.returncode,
            stop_requested=self._stop_since is not None,
            logs=self._logs,
            memory_kills=memory_kills() - self._memory_kills,
        )

    def start_torchrun(self) -> "subprocess.Popen[bytes]":
        """Start the launcher of the ranks, once: a rank that ends is the end of the attempt."""
        launch = self._spec.run.launch
        cores = len(os.sched_getaffinity(0))
        threads = launch.threads_per_rank or max(1, cores // launch.ranks_per_node)
        command = [
            *(sys.executable, "-m", "training.torchrun", str(os.getpid()), str(self._failures_file)),
            *("--standalone", "--max-restarts=0", f"--nproc-per-node={launch.ranks_per_node}"),
            *("--monitor-interval=0.2", f"--shutdown-timeout={SHUTDOWN_SECONDS}"),
            *("--log-dir", str(self._logs), "--redirects=3"),
            *("-m", "training.main", str(self._attempt_file)),
        ]
        self._logs.mkdir(parents=True, exist_ok=True)
        with (self._logs / "torchrun.log").open("ab") as log:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": str(threads)},
            )

    def _watch(self, torchrun: "subprocess.Popen[bytes]") -> AttemptOutcome | None:
        """Return when torchrun has ended (None), or when the agent has a reason of its own to end the attempt."""
        while torchrun.poll() is None:
            if os.getppid() != self._parent_pid:
                return _failed("ParentEnded", "The process that launched the attempt ended.")
            self._record_processes()
            if hang := self._detector.look(time.monotonic()):
                return self._hung(hang)
            newest = max((beat.step for beat in self._detector.beats().values()), default=0)
            self._machine.look(time.monotonic(), newest)
            if self._stop_since is not None and (stopped := self._pass_on_stop(torchrun.pid)):
                return stopped
            time.sleep(POLL_SECONDS)
        return None

    def _hung(self, hang: Hang) -> AttemptOutcome:
        """The verdict on a hang, with what every rank was doing."""
        stacks = collect_stacks(self._spec, {rank: beat.pid for rank, beat in self._detector.beats().items()})
        message = " ".join(part for part in (hang.describe(), tell_stacks(stacks, hang.rank)) if part)
        if stacks:
            message += f" Stacks: {stack_path(self._spec, hang.rank).parent}"
        return _failed("Hang", message, rank=hang.rank, step=hang.beat.step if hang.beat else None)

    def _pass_on_stop(self, torchrun_pid: int) -> AttemptOutcome | None:
        """Ask the ranks to save and end; give the verdict when they cannot, or do not within the grace time."""
        assert self._stop_since is not None
        if len(self._detector.beats()) < self._spec.run.launch.world_size:
            return AttemptOutcome(kind="stopped", message=STOPPED_EARLY)
        if not self._stop_passed_on:
            self._stop_passed_on = True
            # Not through torchrun: it would give the ranks a time limit of its own.
            for pid in descendants(torchrun_pid):
                _signal(pid, signal.SIGTERM)
        if time.monotonic() - self._stop_since <= self._spec.run.launch.stop_grace_seconds:
            return None
        message = (
            f"Stopped; the ranks had not saved within {self._spec.run.launch.stop_grace_seconds:g} s "
            "(launch.stop_grace_seconds), so the newest committed checkpoint is what there is."
        )
        return AttemptOutcome(kind="stopped", message=message)

    def _record_processes(self) -> None:
        """Leave a list for the case that this process is killed and something escapes the parent-death signals."""
        new = [pid for pid in descendants(os.getpid()) if pid not in self._seen]
        if new:
            self._seen |= {pid: start_time(pid) for pid in new}
            listed = [{"pid": pid, "start_time": started} for pid, started in self._seen.items()]
            _write_json(self._spec.work_path / PROCESSES_NAME, json.dumps(listed))


def _failed(kind: str, message: str, *, rank: int | None = None, step: int | None = None) -> AttemptOutcome:
    return AttemptOutcome(kind="failed", message=message, error_kind=kind, rank=rank, step=step)


def _signal(pid: int, sig: signal.Signals) -> None:
    try:
        os.kill(pid, sig)
    except ProcessLookupError:
        return


def _write_json(path: Path, text: str) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def main() -> None:
    """Entry point of the agent; the exit code says nothing, `outcome.json` does."""
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s agent %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    parent_pid, attempt_file = int(sys.argv[1]), Path(sys.argv[2])
    become_subreaper()
    faults.register("agent")
    spec = read_attempt(attempt_file)
    agent = Agent(spec, attempt_file, parent_pid)
    signal.signal(signal.SIGTERM, agent.request_stop)
    signal.signal(signal.SIGINT, agent.request_stop)
    outcome = agent.run()
    logger.info("Attempt %d: %s", spec.attempt, outcome.message)
    _write_json(spec.work_path / OUTCOME_NAME, outcome.model_dump_json(indent=2))


if __name__ == "__main__":
    main()
