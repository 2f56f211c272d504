"""From where the next attempt goes on, and whether it should."""

import logging
import shutil
from pathlib import Path

from headrace.environment import work_path
from headrace.events import EventWriter
from headrace.storage import Storage
from training.checkpoint.catalog import COMMIT_NAME, Choice, choose_restore, quarantined_by
from training.health.rewind import SkipRange, read_rewind, rewound_by
from training.launch.attempts import (
    attempt_numbers,
    claim_attempt,
    make_record,
    newest_attempt,
    read_attempt_record,
)
from training.run_spec import AttemptSpec, RunSpec

logger = logging.getLogger(__name__)


def next_attempt(storage: Storage, run: RunSpec, *, work_root: Path | None = None) -> AttemptSpec | None:
    """Claim the next attempt of a run and say what it starts from; None when the run is finished.

    `run` carries the execution parts of this attempt. Raises Terminal when every committed checkpoint is damaged, and
    InputError when a checkpoint of another run lies among them.
    """
    while True:
        newest = newest_attempt(storage, run.run_prefix)
        number = newest + 1
        skip, last_good_step = _rewound(storage, run.run_prefix, newest)
        choice = choose_restore(storage, run, not_after=last_good_step)
        checkpoint = choice.checkpoint
        if checkpoint is not None and checkpoint.step >= run.training.steps:
            return None
        restore = checkpoint.restore_point if checkpoint else None
        if claim_attempt(storage, run.run_prefix, make_record(run, number, restore, skip)):
            break
        # Somebody else launched an attempt meanwhile. Ours would fence it off: choose again, from what it left.
        logger.warning("Attempt %d was claimed by another process.", number)
    spec = AttemptSpec(
        run=run,
        attempt=number,
        restore=restore,
        skip=skip,
        storage_root=storage.root_url,
        work_dir=str((work_root or work_path()) / run.run_id / f"attempt-{number:04d}"),
    )
    _prepare_work_dir(spec, choice)
    return spec


def attempts_without_progress(storage: Storage, run_prefix: str, *, since_attempt: int = 1) -> int:
    """How many of the newest attempts in a row, from `since_attempt` on, brought the run no further.

    An attempt brings it further when it commits a checkpoint, when it finds a damaged one and sets it aside (which can
    happen only as often as there are checkpoints), and when it asks to go back (`stability.max_interventions`).
    """
    progressed = set(committed_by(storage, run_prefix)) | quarantined_by(storage, run_prefix)
    progressed |= rewound_by(storage, run_prefix)
    count = 0
    for number in reversed(attempt_numbers(storage, run_prefix)):
        if number in progressed or number < since_attempt:
            break
        count += 1
    return count


def committed_by(storage: Storage, run_prefix: str) -> dict[int, int]:
    """The newest step of each attempt that committed anything, on the chain or not."""
    newest: dict[int, int] = {}
    for key in storage.list(f"{run_prefix}/checkpoints"):
        if key.endswith(f"/{COMMIT_NAME}"):
            step, attempt = (int(name.partition("-")[2]) for name in key.split("/")[-3:-1])
            newest[attempt] = max(step, newest.get(attempt, 0))
    return newest


def _rewound(storage: Storage, run_prefix: str, newest: int) -> tuple[tuple[SkipRange, ...], int | None]:
    """What the attempt after `newest` passes over, and the step before which it must start, after a rewind."""
    if newest == 0:
        return (), None
    skip = read_attempt_record(storage, run_prefix, newest).skip
    request = read_rewind(storage, run_prefix, newest)
    if request is None:
        return skip, None
    return (*skip, request.skip), request.last_good_step


def _prepare_work_dir(spec: AttemptSpec, choice: Choice) -> None:
    """Start with an empty directory, and with the reasons why newer checkpoints were passed over in the event log."""
    shutil.rmtree(spec.work_path, ignore_errors=True)
    spec.work_path.mkdir(parents=True, mode=0o700)
    if choice.refused:
        events = EventWriter(spec.events_path, spec.attempt)
        for folder, reason in choice.refused.items():
            events.append("checkpoint.refused", folder=folder, reason=reason)
        events.close()
