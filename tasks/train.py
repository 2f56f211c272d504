"""The stage `train`: each try of this task is one attempt, and Prefect's retries are the only loop over attempts.

The store says what is done: a try first asks where the run stands, so a finished run is a no-op, and a killed command
goes on from the last commit when it is given again.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from headrace.errors import Cancelled, HeadraceError, Terminal
from headrace.mirror import EventMirror
from headrace.terminal import StageProgress
from headrace.tracking import Status
from tasks.console import terminal
from tasks.policy import RETRY_DELAYS, TRAINING_RETRIES, worth_another_try
from tasks.progress_page import ProgressPage
from tasks.runs import Run, Workspace
from tasks.shown import bring_up_to_date, open_attempt
from tasks.stopping import FENCE_SECONDS, PREFECT_SECONDS, Every, StopSignals, is_cancelled_in_prefect, is_fenced
from training.checkpoint.catalog import Checkpoint, list_commits
from training.checkpoint.keeper import Keeper
from training.health.rewind import Rewind
from training.launch.attempts import attempt_numbers, newest_attempt, read_attempts, rewound_to
from training.launch.resume import attempts_without_progress, next_attempt
from training.launch.supervisor import run_attempt
from training.run_spec import AttemptSpec

FLUSH_SECONDS = 60.0
"""How long a finished attempt waits for MLflow; what is left is taken from the store later."""

RETENTION_SECONDS = 30.0
"""How long a finished attempt waits for old checkpoints to be deleted; what is left goes after the next commit or by
`headrace checkpoints gc`."""

STATUS: dict[str, Status] = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}


@dataclass(frozen=True)
class TrainResult:
    """The finished training of a run."""

    step: int
    checkpoint: Checkpoint
    attempts: int
    """Launches over the whole life of the run."""
    reused: bool
    """Nothing was left to do."""
    last_metrics: dict[str, Any] = field(default_factory=dict)


@dataclass
class TrainingSession:
    """What one command remembers between its attempts."""

    first_attempt: int | None = None
    """The first attempt of this command: the progress rule does not count older ones."""
    causes: dict[int, str] = field(default_factory=dict)
    """Why each attempt of this command failed."""
    last_metrics: dict[str, Any] = field(default_factory=dict)
    should_stop: Callable[[], bool] = lambda: False
    """Whether somebody outside asked this command to stop."""


@task(
    name="train",
    retries=TRAINING_RETRIES,
    retry_delay_seconds=RETRY_DELAYS,
    retry_condition_fn=worth_another_try,
    cache_policy=NO_CACHE,
    persist_result=False,
)
def train(space: Workspace, run: Run, session: TrainingSession) -> TrainResult:
    """Launch one attempt, or find that the run is finished.

    Raises AttemptFailed when another try may finish it, and Terminal with the first root cause when the last
    `launch.max_attempts_without_progress` attempts committed nothing new.
    """
    spec = run.spec
    with terminal().stage("train", total=spec.training.steps, unit="step") as stage:
        attempt = next_attempt(space.storage, spec, work_root=space.work_dir)
        if attempt is not None:
            _run_attempt(space, run, attempt, session, stage)
        result = _result(space, run, session)
        stage.conclude(_conclusion(result))
        return result


def _result(space: Workspace, run: Run, session: TrainingSession) -> TrainResult:
    checkpoint = list_commits(space.storage, run.spec.run_prefix)[0]
    attempts = attempt_numbers(space.storage, run.spec.run_prefix)
    return TrainResult(
        step=checkpoint.step,
        checkpoint=checkpoint,
        attempts=len(attempts),
        reused=session.first_attempt is None,
        last_metrics=session.last_metrics,
    )


def _conclusion(result: TrainResult) -> str:
    if result.reused:
        return f"reused: step {result.step} is committed"
    attempts = "1 attempt" if result.attempts == 1 else f"{result.attempts} attempts"
    loss = result.last_metrics.get("loss")
    return f"step {result.step}, {attempts}" + (f", loss {loss:.4g}" if isinstance(loss, float) else "")


def _run_attempt(
    space: Workspace, run: Run, attempt: AttemptSpec, session: TrainingSession, stage: StageProgress
) -> None:
    """Run one attempt, shown live; returns when it finished, raises when it did not."""
    session.first_attempt = session.first_attempt or attempt.attempt
    page = ProgressPage(run.spec.training.steps)
    progress = _Progress(stage, attempt, page)
    mirror = _mirror(space, run, attempt.attempt)
    keeper = Keeper(space.storage, attempt.run)

    def on_event(event: dict[str, Any]) -> None:
        mirror(event)
        progress(event)
        keeper(event)

    fenced = Every(FENCE_SECONDS, lambda: is_fenced(_newest(space, run), attempt.attempt))
    cancelled = Every(PREFECT_SECONDS, is_cancelled_in_prefect)
    status: Status = "KILLED"
    try:
        with page, StopSignals(lambda: stage.note("stopping: saving first; once more to stop at once")) as signals:
            outcome = run_attempt(
                space.storage,
                attempt,
                on_event=on_event,
                should_stop=lambda: signals.asked or session.should_stop() or cancelled() or fenced(),
            )
        status = STATUS[outcome.kind]
    finally:
        session.last_metrics = progress.metrics or session.last_metrics
        # Before the next attempt is claimed: what it starts from is chosen among checkpoints that stay.
        keeper.close(RETENTION_SECONDS if status == "FINISHED" else 0.0)
        _close(space, mirror, status)
    if outcome.kind == "finished" and (signals.asked or session.should_stop()):
        # The request came with the last step: what was asked to stop is the command, not only this stage.
        raise Cancelled(f"{outcome.message} Stopped before the next stage; the same command continues from there.")
    if outcome.kind == "stopped":
        raise Cancelled(f"{outcome.message} The same command continues from there.")
    error = outcome.error()
    if error is not None:
        raise _with_progress_rule(space, run, attempt.attempt, session, error)


def _newest(space: Workspace, run: Run) -> Callable[[], int]:
    return lambda: newest_attempt(space.storage, run.spec.run_prefix)


def _mirror(space: Workspace, run: Run, attempt: int) -> EventMirror:
    prefix = run.spec.run_prefix

    def open_this_attempt() -> str:
        bring_up_to_date(space, run, running=attempt)
        record = next(r for r in read_attempts(space.storage, prefix) if r.attempt == attempt)
        return open_attempt(space, run, record)

    return EventMirror(
        space.tracker,
        parent_id=run.run_id,
        open_attempt=open_this_attempt,
        is_newest=lambda: _newest(space, run)() == attempt,
        rewound_to=rewound_to(read_attempts(space.storage, prefix)),
    )


def _close(space: Workspace, mirror: EventMirror, status: Status) -> None:
    """Deliver the rest; an attempt whose values are not all in MLflow stays RUNNING there, to be completed later."""
    timeout = FLUSH_SECONDS if status == "FINISHED" else FLUSH_SECONDS / 6
    if mirror.close(timeout) and mirror.attempt_run_id is not None:
        try:
            space.tracker.set_status(mirror.attempt_run_id, status)
        except HeadraceError:
            terminal().note("train: MLflow does not answer; the attempt is completed there by the next command.")


def _with_progress_rule(
    space: Workspace, run: Run, attempt: int, session: TrainingSession, error: HeadraceError
) -> HeadraceError:
    """The error to raise: itself, or the end of the run when too many attempts in a row brought it no further."""
    session.causes[attempt] = str(error)
    if not error.retryable:
        return error
    stuck = attempts_without_progress(
        space.storage, run.spec.run_prefix, since_attempt=session.first_attempt or attempt
    )
    how = "goes back" if isinstance(error, Rewind) else "failed"
    terminal().note(f"train: attempt {attempt} {how}: {error}")
    if stuck < run.spec.launch.max_attempts_without_progress:
        return error
    first = session.causes.get(attempt - stuck + 1, str(error))
    return Terminal(
        f"{stuck} attempts in a row committed no new step (launch.max_attempts_without_progress). The first one: "
        f"{first} Correct the cause and give the same command again: it continues from the last commit."
    )


class _Progress:
    """Shows the events of an attempt."""

    def __init__(self, stage: StageProgress, attempt: AttemptSpec, page: ProgressPage) -> None:
        self._stage = stage
        self._page = page
        self._attempt = attempt.attempt
        self._committed_at: float | None = None
        self.metrics: dict[str, Any] = {}
        stage.update(attempt.restore.step if attempt.restore else 0)

    def __call__(self, event: dict[str, Any]) -> None:
        kind = event["kind"]
        if kind == "step":
            self.metrics = event
            fields = {name: event[name] for name in ("loss", "tokens_per_second") if name in event}
            self._stage.update(event["step"], **fields, checkpoint=self._age(event["time"]))
            self._page.show(event["step"], f"attempt {self._attempt}: {self._stage.describe()}")
        elif kind == "evaluation":
            self._stage.update(bits_per_byte=event["bits_per_byte"])
        elif kind == "save.committed":
            self._committed_at = event["time"]
        elif kind == "checkpoint.loaded":
            # Not before: until all of it has been read and verified, the attempt may still have to set it aside.
            self._stage.note(f"attempt {self._attempt} goes on from step {event['step']}")
        elif kind == "batch.skipped":
            self._stage.note(f"a batch is passed over: step {event['step']} gave {event['reason']}")
        elif kind == "save.failed":
            self._stage.note(f"the save of step {event['step']} failed, training goes on: {event['message']}")

    def _age(self, now: float) -> str:
        return "none yet" if self._committed_at is None else f"{max(0.0, now - self._committed_at):.0f} s old"
