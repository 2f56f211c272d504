"""Saves that run beside the training, and loads that verify: what the training loop calls.

One save is in flight at most. A save that is due while the one before is still being written is skipped and noted: a
slow store costs checkpoints, never training steps. Every rank takes the same decision, because the decision is taken
together on a process group of its own. The groups here are separate from the training's: two threads must not use one
group at the same time.
"""

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import async_save as dcp_async_save

from headrace.commit import FileEntry, write_commit
from headrace.errors import AttemptFailed, DamagedData, HeadraceError
from headrace.events import EventWriter
from headrace.faults import fault_point
from headrace.patience import patiently
from headrace.s3_uploader import Uploader
from headrace.storage import Storage
from training.checkpoint.catalog import (
    COMMIT_KIND,
    Checkpoint,
    DamagedCheckpoint,
    attempt_of,
    checkpoint_prefix,
    open_checkpoint,
    quarantine,
    require_same_run,
)
from training.checkpoint.format import Item
from training.checkpoint.reader import CheckpointReader, read_metadata, require_fit
from training.checkpoint.staging import StagedSavePlanner, StagingBuffers
from training.checkpoint.writer import CheckpointWriter
from training.launch.attempts import newest_attempt
from training.run_spec import AttemptSpec, RestorePoint
from training.state import TrainState

logger = logging.getLogger(__name__)

T = TypeVar("T")

_POLL_SECONDS = 0.005


class Superseded(HeadraceError):
    """A newer attempt of the same run was launched: this one must end, and nothing it writes counts any more."""


@dataclass
class _Save:
    """The save in flight."""

    step: int
    future: "Future[Any]"
    started: float
    """time.monotonic() seconds."""
    overdue: bool = False
    """It took too long and was counted as failed, but its thread still runs and holds the buffers."""


class AsyncCheckpointer:
    """The checkpoints of one attempt, on one rank. Every rank makes the same calls in the same order.

    Only rank 0 passes `events`; it gets `save.begun`, `save.staged`, `save.committed` (in the moment of the commit),
    `save.failed`, `save.skipped`, `checkpoint.loaded` and `checkpoint.damaged`.
    """

    def __init__(self, storage: Storage, spec: AttemptSpec, *, events: EventWriter | None = None) -> None:
        self._storage = storage
        self._spec = spec
        self._run = spec.run
        self._events = events
        self._owns_world = _join_a_world_of_one()
        self._rank = dist.get_rank()
        self._buffers = StagingBuffers()
        self._uploader = Uploader(storage.root_url) if storage.is_s3 else None
        if self._uploader is not None:
            self._uploader.start()
        self._in_flight: _Save | None = None
        self._failures = 0
        self._committed: int | None = None
        """The newest step this attempt committed, or started from."""
        self._unreported: int | None = None
        self._required: int | None = None
        """The step whose save may not fail."""
        self._last_error = ""
        self._swept = False
        self._seconds = self._run.checkpoint.save_timeout_seconds
        # Ranks may come to the decision about a save up to one save's time apart.
        self._control_group = _new_group(2 * self._seconds + 60)
        self._save_group = _new_group(self._seconds)

    def save_async(self, state: TrainState, *, required: bool = False) -> bool:
        """Copy the state and start to write it; return as soon as the copy is made. False when the save was skipped.

        A `required` save (the last step is one by itself) waits for the one in flight instead of being skipped.
        Saving a step that this attempt has already committed does nothing. Raises AttemptFailed, on every rank, when
        `max_failed_saves` saves in a row failed, or when a required one cannot start.
        """
        required = required or state.step >= self._run.training.steps
        if required:
            self._required = state.step
            self._finish()
        self._collect()
        busy, failures = self._agree()
        if failures >= self._run.checkpoint.max_failed_saves or (busy and required):
            raise AttemptFailed(
                f"{failures} saves in a row failed at {self._storage.url(self._run.run_prefix)}. The newest failure: "
                f"{self._last_error or 'see save.failed in the event log.'}"
            )
        if busy:
            self._event("save.skipped", step=state.step, reason="the save before is still being written")
            return False
        if self._committed == state.step:
            return True
        if failures:
            # A rank that failed may have left the others in the middle of a collective: that group is of no more use.
            self._save_group = _new_group(self._seconds)
        self._start(state)
        return True

    def poll(self) -> int | None:
        """The step of a save that was committed since the last call, or None. Never waits.

        Raises Superseded when a newer attempt of this run was found while committing.
        """
        self._collect()
        step, self._unreported = self._unreported, None
        return step

    def wait(self) -> int | None:
        """Finish the save in flight (within the save's time limit) and return its step as `poll` does.

        Raises AttemptFailed when that was a required save and it failed.
        """
        self._finish()
        self._collect()
        if self._required is not None and self._committed != self._required:
            raise AttemptFailed(f"The state of step {self._required} could not be saved: {self._last_error}")
        return self.poll()

    def load(self, state: TrainState, restore: RestorePoint) -> None:
        """Fill `state` from a committed checkpoint of this run, each chunk verified.

        Raises DamagedCheckpoint, on every rank, when something does not verify: the checkpoint is set aside then, and
        the next attempt starts from an older one. Raises InputError for a checkpoint of another run or model.
        """
        started = time.monotonic()
        checkpoint = self._open(restore)
        try:
            tensors = self._read(state, checkpoint)
        except DamagedData as error:
            quarantine(self._storage, checkpoint, reason=str(error), found_by_attempt=self._spec.attempt)
            self._event("checkpoint.damaged", step=checkpoint.step, from_attempt=checkpoint.attempt, reason=str(error))
            self._publish_events()
            raise DamagedCheckpoint(
                f"The checkpoint of step {checkpoint.step} is damaged and was set aside: {error} The next attempt "
                "starts from an older one."
            ) from error
        state.load_state_dict({"tensors": tensors, "values": checkpoint.commit.body["state"]})
        self._committed = checkpoint.step
        seconds = time.monotonic() - started
        self._event("checkpoint.loaded", step=checkpoint.step, from_attempt=checkpoint.attempt, seconds=seconds)

    def close(self) -> None:
        """Free the buffers, the upload process, and the process group when made here. No save may be in flight."""
        self._buffers.close()
        if self._uploader is not None:
            self._uploader.close()
        if self._owns_world:
            dist.destroy_process_group()

    # ------------------------------------------------------------------------------------------------ saving

    def _start(self, state: TrainState) -> None:
        step, values = state.step, state.values()
        self._event("save.begun", step=step)
        fault_point("save.begun", step=step, rank=self._rank)
        started = time.monotonic()
        until = started + self._seconds
        if self._uploader is not None:
            self._uploader.start()  # here, and not in the save's thread, with which the kernel would end it
        tensors = state.tensors()
        prefix = checkpoint_prefix(self._run.run_prefix, step=step, attempt=self._spec.attempt)
        writer = CheckpointWriter(
            self._storage,
            prefix,
            step=step,
            rank=self._rank,
            staging_dir=self._spec.work_path / "staging" / f"step-{step:08d}",
            put_file=lambda local, key: self._put_file(local, key, until),
            commit=lambda files: self._commit(prefix, step, values, files, started),
            until=until,
        )
        future = dcp_async_save(
            tensors,
            storage_writer=writer,
            planner=StagedSavePlanner(self._buffers.plan(tensors)),
            process_group=self._save_group,
            async_stager=self._buffers,
        )
        assert isinstance(future, Future)
        self._in_flight = _Save(step, future, started)
        self._event(
            "save.staged", step=step, blocking_seconds=time.monotonic() - started, bytes=self._buffers.num_bytes
        )

    def _put_file(self, local: Path, key: str, until: float) -> None:
        """Copy a staged file to the store; runs in the save's thread."""
        if self._uploader is None:
            self._storage.put_file(local, key)
        else:
            fault_point("storage.write", key=key)
            self._uploader.upload(local, key, until=until)

    def _commit(
        self, prefix: str, step: int, values: dict[str, Any], files: dict[str, FileEntry], started: float
    ) -> None:
        """Make the checkpoint exist; runs on rank 0, in the save's thread, when all files are stored."""
        until = started + self._seconds
        patiently(self._publish_events, until)
        newest = patiently(lambda: newest_attempt(self._storage, self._run.run_prefix), until)
        if newest > self._spec.attempt:
            raise Superseded(
                f"Attempt {newest} of run {self._run.run_id} was launched while attempt {self._spec.attempt} still "
                f"ran: this one ends, and its checkpoint of step {step} is not committed."
            )
        fault_point("commit.before", step=step, rank=self._rank)
        body = {
            "run_id": self._run.run_id,
            "run_key": self._run.run_key,
            "step": step,
            "attempt": self._spec.attempt,
            "layout": {**self._run.layout.model_dump(mode="json"), "world_size": dist.get_world_size()},
            "model": self._run.model.model_dump(mode="json"),
            "dataset_digest": self._run.dataset_digest,
            "tokenizer_digest": self._run.tokenizer_digest,
            "state": values,
        }
        # Again after a lost answer: an identical commit that is there already is ours.
        patiently(lambda: write_commit(self._storage, prefix, kind=COMMIT_KIND, body=body, files=files), until)
        fault_point("commit.after", step=step, rank=self._rank)
        num_bytes = sum(entry.size for entry in files.values())
        self._event("save.committed", step=step, seconds=time.monotonic() - started, bytes=num_bytes)
        self._remove_unfinished_uploads()

    def _remove_unfinished_uploads(self) -> None:
        """After the first commit, free what killed attempts left of their uploads; a failure costs only room."""
        if self._swept:
            return
        self._swept = True
        try:
            # All files of this save are stored, and earlier attempts are fenced off: nobody will finish any of these.
            prefix = f"{self._run.run_prefix}/checkpoints"
            removed = self._storage.abort_uploads(prefix, lambda key: attempt_of(key) <= self._spec.attempt)
            removed += self._storage.remove_abandoned(prefix)
            if removed:
                logger.info("Removed %d unfinished uploads of killed processes.", removed)
        except HeadraceError as error:
            logger.warning("Unfinished uploads could not be removed: %s", error)

    def _collect(self) -> None:
        """Take note of a save that has ended, or that has had more than its time."""
        save = self._in_flight
        if save is None:
            return
        if save.future.done():
            self._in_flight = None
            error = save.future.exception()
            if error is None:
                self._failures = 0
                self._committed = self._unreported = save.step
            else:
                self._failures += not save.overdue
                self._tell_failure(save, _cause(error))
        elif not save.overdue and time.monotonic() - save.started > self._seconds:
            save.overdue = True
            self._failures += 1
            self._tell_failure(save, TimeoutError(f"not committed within save_timeout_seconds ({self._seconds:g})"))

    def _tell_failure(self, save: _Save, error: Exception) -> None:
        if isinstance(error, Superseded):
            raise error
        self._last_error = f"step {save.step}: {error}"
        logger.warning("The save of step %d failed: %s", save.step, error)
        self._event("save.failed", step=save.step, error=type(error).__name__, message=str(error))

    def _finish(self) -> None:
        """Wait for the save in flight until it ends or its time is over."""
        save = self._in_flight
        while save is not None and not save.overdue and not save.future.done():
            time.sleep(_POLL_SECONDS)
            self._collect()

    def _agree(self) -> tuple[bool, int]:
        """Whether any rank's save is in flight, and the most failures in a row that a rank has seen."""
        if self._in_flight is not None and self._in_flight.overdue:
            # It had its time and still runs: each save that it keeps from starting is another failure.
            self._failures += 1
        decision = torch.tensor([int(self._in_flight is not None), self._failures])
        dist.all_reduce(decision, op=dist.ReduceOp.MAX, group=self._control_group)
        return bool(decision[0]), int(decision[1])

    # ------------------------------------------------------------------------------------------------ loading

    def _open(self, restore: RestorePoint) -> Checkpoint:
        def find() -> Checkpoint:
            checkpoint = open_checkpoint(self._storage, self._run.run_prefix, restore)
            require_same_run(self._run, checkpoint)
            return checkpoint

        try:
            return self._together(find)
        except DamagedData as error:
            raise DamagedCheckpoint(f"The checkpoint of step {restore.step} cannot be used: {error}") from error

    def _read(self, state: TrainState, checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
        def find() -> dict[str, Item]:
            return read_metadata(self._storage, checkpoint.prefix, checkpoint.commit)

        items = self._together(find)
        # A rank that did not exist when the checkpoint was written has no random state there, and keeps its own.
        own = state.random_state_name
        tensors = {name: tensor for name, tensor in state.tensors().items() if name in items or name != own}
        require_fit(items, tensors, self._storage.url(checkpoint.prefix))
        try:
            dcp_load(
                dict(tensors),
                storage_reader=CheckpointReader(self._storage, checkpoint.prefix, items),
                planner=DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
                process_group=self._save_group,
            )
        except CheckpointException as error:
            raise _cause(error) from error
        return tensors

    def _together(self, read: Callable[[], T]) -> T:
        """Run `read` on every rank; an error on one is raised on all, so that no rank waits for another."""
        found: T | None = None
        own: HeadraceError | None = None
        try:
            found = read()
        except HeadraceError as error:
            own = error
        all_of_them: list[HeadraceError | None] = [None] * dist.get_world_size()
        dist.all_gather_object(all_of_them, own, group=self._save_group)
        for problem in all_of_them:
            if problem is not None:
                raise problem
        assert found is not None
        return found

    # ------------------------------------------------------------------------------------------------ events

    def _event(self, kind: str, **fields: Any) -> None:
        if self._events is not None:
            self._events.append(kind, **fields)

    def _publish_events(self) -> None:
        if self._events is not None:
            self._events.publish(self._storage, self._run.run_prefix)


def _new_group(seconds: float) -> Any:
    return dist.new_group(backend="gloo", timeout=timedelta(seconds=seconds))


def _join_a_world_of_one() -> bool:
    """Give a single process a process group too, so that there is one way to save; True when it had none."""
    if dist.is_initialized():
        return False
    store = dist.HashStore()  # type: ignore[attr-defined] # public, but missing in torch's list of exports
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    return True


def _cause(error: BaseException) -> Exception:
    """The first of the errors that ranks had, as an Exception: torch's own is none, and would escape every handler."""
    if isinstance(error, CheckpointException):
        causes = [failure[0] for _, failure in sorted(error.failures.items())]
        ours = [cause for cause in causes if isinstance(cause, HeadraceError)]
        error = (ours or causes)[0]
    if isinstance(error, Exception):
        return error
    return AttemptFailed(f"{type(error).__name__}: {error}")
