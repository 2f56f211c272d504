"""Deleting what retention has decided to delete, so that nothing is lost wherever the process is killed.

The commit object of a checkpoint goes first: from there on it does not exist, and what is left of it is swept by the
next look. Before each commit object is deleted, the attempts are looked at: a plan holds for the newest attempt that it
was made for.
"""

import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass

from headrace.faults import fault_point
from headrace.storage import Storage
from training.checkpoint.catalog import COMMIT_NAME, folder_of
from training.checkpoint.config import CheckpointConfig
from training.checkpoint.history import Memory, read_history
from training.checkpoint.retention import Plan, Verdict, plan_retention
from training.launch.attempts import newest_attempt
from training.run_spec import RunSpec

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Collection:
    """What one look at a run decided, and how much of it was done."""

    plan: Plan
    uploads: tuple[str, ...]
    """Keys of unfinished uploads of attempts that have ended."""
    deleted: tuple[str, ...] = ()
    """Folders that are gone."""
    complete: bool = False
    """Everything of the plan was done."""

    @property
    def num_bytes(self) -> int:
        """Bytes that the plan frees."""
        return sum(verdict.num_bytes for verdict in (*self.plan.delete, *self.plan.sweep))


def look(
    storage: Storage,
    run: RunSpec,
    policy: CheckpointConfig,
    *,
    memory: Memory | None = None,
    on_bytes: Callable[[int], None] = lambda _: None,
) -> Collection:
    """Decide what goes, and delete nothing; raises what `read_history` raises."""
    history = read_history(storage, run, scores=policy.keep_best > 0, memory=memory, on_bytes=on_bytes)
    plan = plan_retention(history, policy)
    return Collection(plan, tuple(_stale_uploads(storage, run.run_prefix, plan)))


def carry_out(
    storage: Storage, run: RunSpec, found: Collection, *, go_on: Callable[[], bool] = lambda: True
) -> Collection:
    """Delete what was decided; returns what was done, which is less when `go_on` says no or a newer attempt begins."""
    plan = found.plan
    deleted: list[str] = []

    def result(*, complete: bool) -> Collection:
        return Collection(plan, found.uploads, tuple(deleted), complete)

    if plan.delete:
        fault_point("retention.before", step=plan.newest_whole)
    for verdict in plan.delete:
        if not go_on() or newest_attempt(storage, run.run_prefix) != plan.newest_attempt:
            return result(complete=False)
        logger.info(
            "Deleting the checkpoint of step %d (attempt %d): %s.", verdict.step, verdict.attempt, verdict.reason
        )
        storage.delete(f"{verdict.prefix}/{COMMIT_NAME}")
        fault_point("retention.commit_deleted", step=verdict.step)
        _remove_folder(storage, verdict)
        deleted.append(verdict.prefix)
    for verdict in plan.sweep:
        if not go_on():
            return result(complete=False)
        _remove_folder(storage, verdict)
        deleted.append(verdict.prefix)
    if found.uploads:
        storage.abort_uploads(f"{run.run_prefix}/checkpoints", lambda key: _is_stale(key, plan))
    if plan.delete:
        fault_point("retention.after", step=plan.newest_whole)
    return result(complete=True)


def _remove_folder(storage: Storage, verdict: Verdict) -> None:
    storage.delete_prefix(verdict.prefix)
    step_folder = storage.local_path(verdict.prefix.rpartition("/")[0])
    if step_folder is not None:
        with contextlib.suppress(OSError):  # another attempt's checkpoint of this step lies there
            step_folder.rmdir()


def _stale_uploads(storage: Storage, run_prefix: str, plan: Plan) -> list[str]:
    """Keys of uploads that nobody will finish; none is removed here."""
    found: list[str] = []

    def note(key: str) -> bool:
        if _is_stale(key, plan):
            found.append(key)
        return False

    storage.abort_uploads(f"{run_prefix}/checkpoints", note)
    return sorted(found)


def _is_stale(key: str, plan: Plan) -> bool:
    """Whether an upload belongs to an attempt that is fenced off; the newest one may be writing."""
    folder = folder_of(key)
    return folder is not None and folder[1] < plan.newest_attempt
