"""One attempt, seen from the process that wants it: start the agent, pass on what happens, never leave anything behind.

The loop over attempts is not here: whoever calls decides, from the outcome and `attempts_without_progress`, whether to
ask for the next one.
"""

import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from headrace.errors import HeadraceError
from headrace.events import EventTail, EventWriter
from headrace.process import pid_alive
from headrace.storage import Storage
from training.checkpoint.catalog import newest_commit
from training.launch.agent import KILL_GRACE_SECONDS, OUTCOME_NAME, PROCESSES_NAME, STOPPED_EARLY
from training.launch.diagnosis import AttemptOutcome
from training.launch.machine import FILE_NAME as MACHINE_NAME
from training.run_spec import AttemptSpec, RunSpec

logger = logging.getLogger(__name__)

AGENT_MODULE = "training.launch.agent"

POLL_SECONDS = 0.25
AGENT_EXIT_SECONDS = 15.0
"""How long the agent may take to end its descendants after its own stop grace time."""

_KILL_WAIT_SECONDS = 5.0


def run_attempt(
    storage: Storage,
    spec: AttemptSpec,
    *,
    on_event: Callable[[dict[str, Any]], None],
    should_stop: Callable[[], bool],
) -> AttemptOutcome:
    """Run one attempt to its end and say how it ended; nothing of it is alive afterwards.

    `on_event` gets every event of rank 0 in order, and samples of the machine, while the attempt runs. When
    `should_stop` turns true, the ranks save within `stop_grace_seconds` and the outcome is `stopped`. When a callback
    raises, the attempt is ended first.
    """
    attempt_file = spec.write()
    tails = EventTail(spec.events_path), EventTail(spec.work_path / MACHINE_NAME)
    agent = _start_agent(spec, attempt_file)
    stop_sent = False
    outcome: AttemptOutcome | None = None
    try:
        while agent.poll() is None:
            _pass_on(tails, on_event)
            if not stop_sent and should_stop():
                stop_sent = True
                agent.send_signal(signal.SIGTERM)
            time.sleep(POLL_SECONDS)
        _end_agent(agent, spec)
        outcome = _outcome(storage, spec, agent.returncode, stop_sent=stop_sent)
    finally:
        _end_agent(agent, spec)
        _publish_leftovers(storage, spec, outcome)
    _pass_on(tails, on_event)
    return outcome


def is_finished(storage: Storage, run: RunSpec) -> bool:
    """Whether the run's last step is committed on the chain by a usable checkpoint."""
    newest = newest_commit(storage, run.run_prefix)
    return newest is not None and newest.step >= run.training.steps


def _start_agent(spec: AttemptSpec, attempt_file: Path) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", AGENT_MODULE, str(os.getpid()), str(attempt_file)]
    with (spec.work_path / "agent.log").open("ab") as log:
        # A session of its own: Ctrl-C in the terminal reaches this process only, which then asks for a proper stop.
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)


def _pass_on(tails: tuple[EventTail, ...], on_event: Callable[[dict[str, Any]], None]) -> None:
    for tail in tails:
        for event in tail.new():
            on_event(event)


def _end_agent(agent: "subprocess.Popen[bytes]", spec: AttemptSpec) -> None:
    """Make sure that neither the agent nor anything it started is alive."""
    if agent.poll() is None:
        agent.send_signal(signal.SIGTERM)
        try:
            agent.wait(spec.run.launch.stop_grace_seconds + AGENT_EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            logger.error("The agent of attempt %d does not end; it is killed.", spec.attempt)
            agent.kill()
            agent.wait()
    if not (spec.work_path / OUTCOME_NAME).is_file():
        _kill_leftovers(spec.work_path / PROCESSES_NAME)


def _kill_leftovers(listed: Path) -> None:
    """Kill what a killed agent had started, except what the kernel's parent-death signals have ended already."""
    try:
        processes = [(int(p["pid"]), p["start_time"]) for p in json.loads(listed.read_text(encoding="utf-8"))]
    except FileNotFoundError:
        return
    time.sleep(KILL_GRACE_SECONDS)
    deadline = time.monotonic() + _KILL_WAIT_SECONDS
    while alive := [(pid, started) for pid, started in processes if pid_alive(pid, started)]:
        for pid, _ in alive:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        if time.monotonic() > deadline:
            logger.error("Processes %s do not end.", [pid for pid, _ in alive])
            return
        time.sleep(0.05)


def _publish_leftovers(storage: Storage, spec: AttemptSpec, outcome: AttemptOutcome | None) -> None:
    """Add how it ended, and upload what the ranks had no time to: later readers go by the log on the store."""
    writer = EventWriter(spec.events_path, spec.attempt)
    try:
        if outcome is not None:
            fields = outcome.model_dump(include={"step", "rank", "error_kind", "message"})
            writer.append("attempt.ended", outcome=outcome.kind, **fields)
        writer.publish(storage, spec.run.run_prefix)
        for path in sorted((spec.work_path / "stacks").glob("rank-*.txt")):
            if path.stat().st_size:
                storage.write_bytes(
                    f"{spec.run.run_prefix}/stacks/attempt-{spec.attempt:04d}/{path.name}", path.read_bytes()
                )
    except HeadraceError as error:
        # Everything up to the newest commit was published before it; a run does not fail for the rest.
        logger.warning("The last events of attempt %d could not be stored: %s", spec.attempt, error)
    finally:
        writer.close()


def _outcome(storage: Storage, spec: AttemptSpec, agent_exit: int | None, *, stop_sent: bool) -> AttemptOutcome:
    path = spec.work_path / OUTCOME_NAME
    try:
        outcome = AttemptOutcome.model_validate_json(path.read_bytes())
    except (FileNotFoundError, ValidationError):
        if stop_sent and agent_exit == -signal.SIGTERM:
            return AttemptOutcome(kind="stopped", message=STOPPED_EARLY)  # it had not yet learned what the signal means
        how = f"was killed by {signal.Signals(-agent_exit).name}" if agent_exit and agent_exit < 0 else "failed"
        message = f"The agent of attempt {spec.attempt} {how}. Log: {spec.work_path / 'agent.log'}"
        outcome = AttemptOutcome(kind="failed", message=message, error_kind="AgentEnded")
    if outcome.kind != "finished" and is_finished(storage, spec.run):
        logger.warning("The last step is committed, so the run is finished, although: %s", outcome.message)
        step = spec.run.training.steps
        return AttemptOutcome(kind="finished", message=f"Finished at step {step}. ({outcome.message})", step=step)
    return outcome
