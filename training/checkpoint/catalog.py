"""The committed checkpoints of a run: which exist, and which one the next attempt starts from.

A checkpoint exists when its `COMMIT.json` exists and the attempt chain covers it. It is *usable* when the commit's own
digest, its identity and the sizes of all its files are right, and when nobody has found damage in its content
(`DAMAGED.json` beside it; content is verified while it is read). No torch here: flows and the launcher import this.
"""

import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from headrace.commit import Commit, check_files, read_commit
from headrace.errors import DamagedData, InputError, Retryable, Terminal
from headrace.storage import Storage, json_document
from training.launch.attempts import chain, is_on_chain, newest_attempt, read_attempt_record, read_attempts
from training.model.config import ModelConfig
from training.run_spec import RestorePoint, RunSpec

logger = logging.getLogger(__name__)

COMMIT_KIND = "checkpoint"
COMMIT_NAME = "COMMIT.json"
DAMAGED_NAME = "DAMAGED.json"

_STEP = re.compile(r"step-(\d{8,})")
_ATTEMPT = re.compile(r"attempt-(\d{4,})")


class SetAside(DamagedData):
    """A checkpoint in which an earlier attempt found damage; that was told when it was found."""


class DamagedCheckpoint(Retryable):
    """The content of a checkpoint is not what its commit says; it is set aside, the next attempt uses an older one."""


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint on the chain."""

    step: int
    attempt: int
    prefix: str
    """Storage key of its folder."""
    commit: Commit

    @property
    def restore_point(self) -> RestorePoint:
        """How an attempt names it."""
        return RestorePoint(attempt=self.attempt, step=self.step)


@dataclass(frozen=True)
class Choice:
    """What the next attempt starts from, and what was refused on the way to it."""

    checkpoint: Checkpoint | None
    """None: nothing was ever committed, so the run starts from its initial weights."""
    refused: dict[str, str] = field(default_factory=dict)
    """Why each newer checkpoint was refused, by its folder."""


def checkpoint_prefix(run_prefix: str, *, step: int, attempt: int) -> str:
    """Storage key of the folder of one attempt's checkpoint of one step; never used twice."""
    return f"{run_prefix}/checkpoints/step-{step:08d}/attempt-{attempt:04d}"


def attempt_of(key: str) -> int:
    """Number of the attempt in whose folder the storage key of a checkpoint's file lies."""
    folder = _ATTEMPT.fullmatch(key.split("/")[-2])
    assert folder is not None, key
    return int(folder[1])


def committed_on_chain(storage: Storage, run_prefix: str) -> Iterator[tuple[int, int, str]]:
    """Step, attempt and folder of every commit that the chain covers, newest step first; nothing is verified."""
    links = chain(read_attempts(storage, run_prefix))
    root = f"{run_prefix}/checkpoints"
    for step, step_name in _numbered(storage.children(root), _STEP):
        for attempt, attempt_name in _numbered(storage.children(f"{root}/{step_name}"), _ATTEMPT):
            prefix = f"{root}/{step_name}/{attempt_name}"
            if is_on_chain(links, attempt=attempt, step=step) and storage.exists(f"{prefix}/{COMMIT_NAME}"):
                yield step, attempt, prefix


def list_commits(storage: Storage, run_prefix: str) -> list[Checkpoint]:
    """Every usable checkpoint on the chain, newest first: damaged ones are left out."""
    return list(_usable(storage, run_prefix))


def newest_commit(storage: Storage, run_prefix: str) -> Checkpoint | None:
    """The first of `list_commits`, without looking at the others."""
    return next(_usable(storage, run_prefix), None)


def choose_restore(storage: Storage, run: RunSpec, *, not_after: int | None = None) -> Choice:
    """The newest usable checkpoint of this run; after a rewind, of a step not after the last good one.

    Raises Terminal when checkpoints were committed but none can be used: starting again from nothing would hide the
    loss of all the work, so a person decides. Raises InputError for a checkpoint of another run.
    """
    refused: dict[str, str] = {}
    for step, attempt, prefix in committed_on_chain(storage, run.run_prefix):
        if not_after is not None and step > not_after:
            continue
        try:
            checkpoint = verified(storage, step, attempt, prefix)
        except DamagedData as error:
            level = logging.INFO if isinstance(error, SetAside) else logging.WARNING
            logger.log(level, "The checkpoint of step %d (attempt %d) is not used: %s", step, attempt, error)
            refused[prefix] = str(error)
            continue
        require_same_run(run, checkpoint)
        return Choice(checkpoint, refused)
    if refused:
        raise Terminal(
            f"All {len(refused)} committed checkpoints below {storage.url(run.run_prefix)}/checkpoints are damaged, "
            f"and the run will not silently start from nothing. The newest: {next(iter(refused.values()))} "
            "Bring back the files from a copy, or start a new run under another name."
        )
    if not_after is None:
        _require_untouched(storage, run.run_prefix)
    return Choice(None)


def open_checkpoint(storage: Storage, run_prefix: str, restore: RestorePoint) -> Checkpoint:
    """One checkpoint by name. Raises InputError when it is not on the chain, DamagedData when it is not usable."""
    prefix = checkpoint_prefix(run_prefix, step=restore.step, attempt=restore.attempt)
    for step, attempt, found in committed_on_chain(storage, run_prefix):
        if found == prefix:
            return verified(storage, step, attempt, found)
    raise InputError(
        f"There is no committed checkpoint of step {restore.step} (attempt {restore.attempt}) at "
        f"{storage.url(prefix)}: it was never committed, or a later attempt went back behind it."
    )


def newest_at(storage: Storage, run_prefix: str, step: int) -> Checkpoint:
    """The chain's checkpoint of `step`, whichever attempt wrote it. Raises InputError naming the steps there are."""
    steps = []
    for found, attempt, prefix in committed_on_chain(storage, run_prefix):
        if found == step:
            return verified(storage, found, attempt, prefix)
        steps.append(found)
    there = ", ".join(str(found) for found in sorted(steps)) if steps else "none"
    raise InputError(f"{storage.url(run_prefix)} has no committed checkpoint of step {step}; its steps are: {there}.")


def quarantine(storage: Storage, checkpoint: Checkpoint, *, reason: str, found_by_attempt: int) -> None:
    """Mark a checkpoint whose content turned out to be damaged, so that no later attempt chooses it."""
    document = {"reason": reason, "found_by_attempt": found_by_attempt, "commit": checkpoint.commit.digest}
    if storage.create(f"{checkpoint.prefix}/{DAMAGED_NAME}", json_document(document)):
        logger.warning("Set aside the checkpoint of step %d: %s", checkpoint.step, reason)


def quarantined_by(storage: Storage, run_prefix: str) -> set[int]:
    """Attempts that found a damaged checkpoint and set it aside: they made it possible for the next one to go on."""
    keys = [key for key in storage.list(f"{run_prefix}/checkpoints") if key.endswith(f"/{DAMAGED_NAME}")]
    return {int(storage.read_json(key)["found_by_attempt"]) for key in keys}


def require_same_run(run: RunSpec, checkpoint: Checkpoint) -> None:
    """Raise InputError, naming each field that differs, when the checkpoint was written by another run or model."""
    body = checkpoint.commit.body
    expected = {
        "run_id": run.run_id,
        "run_key": run.run_key,
        "dataset_digest": run.dataset_digest,
        "tokenizer_digest": run.tokenizer_digest,
    }
    differences = _differences(expected, body) + _model_differences(run.model, body.get("model", {}))
    if differences:
        raise InputError(
            f"The checkpoint at {checkpoint.prefix} belongs to another run: {'; '.join(differences)}. Remove it from "
            "there; to start from its weights, use training.init_from: run:ID@STEP."
        )


def require_same_model(model: ModelConfig, saved: dict[str, Any], where: str) -> None:
    """Raise InputError naming each field in which a saved model differs from the one to be trained."""
    differences = _model_differences(model, saved)
    if differences:
        raise InputError(
            f"The weights at {where} belong to another model: {'; '.join(differences)}. Change these fields of the "
            "model section, or start from other weights."
        )


def _require_untouched(storage: Storage, run_prefix: str) -> None:
    """Raise Terminal when there is no commit though the newest attempt started from one: somebody removed it."""
    newest = newest_attempt(storage, run_prefix)
    restore = read_attempt_record(storage, run_prefix, newest).restore if newest else None
    if restore is not None:
        raise Terminal(
            f"Attempt {newest} started from the checkpoint of step {restore.step}, but there is no committed "
            f"checkpoint left below {storage.url(run_prefix)}/checkpoints, and the run will not silently start from "
            "nothing. Bring back the files from a copy, or start a new run under another name."
        )


def _usable(storage: Storage, run_prefix: str) -> Iterator[Checkpoint]:
    for step, attempt, prefix in committed_on_chain(storage, run_prefix):
        try:
            yield verified(storage, step, attempt, prefix)
        except DamagedData as error:
            # Who chooses from these warns; the others only look, some of them every few seconds.
            logger.info("The checkpoint of step %d (attempt %d) is not used: %s", step, attempt, error)


def verified(storage: Storage, step: int, attempt: int, prefix: str) -> Checkpoint:
    """The checkpoint in this folder, with all checked that can be without reading the tensors; raises DamagedData."""
    if storage.exists(f"{prefix}/{DAMAGED_NAME}"):
        reason = storage.read_json(f"{prefix}/{DAMAGED_NAME}").get("reason", "no reason recorded")
        raise SetAside(f"{prefix} was set aside: {reason}")
    commit = read_commit(storage, prefix, kind=COMMIT_KIND)
    if commit is None:
        raise DamagedData(f"The commit object of {prefix} disappeared while it was read.")
    if (commit.body.get("step"), commit.body.get("attempt")) != (step, attempt):
        raise DamagedData(
            f"{prefix}/{COMMIT_NAME} is the commit of step {commit.body.get('step')}, attempt "
            f"{commit.body.get('attempt')}: it was copied here from another folder."
        )
    check_files(storage, prefix, commit, content=False)
    return Checkpoint(step, attempt, prefix, commit)


def folder_of(key: str) -> tuple[int, int, str] | None:
    """Step, attempt and folder of the checkpoint that a storage key lies in; None when it lies in none."""
    folder, _, _ = key.rpartition("/")
    parts = folder.split("/")
    if len(parts) < 3 or parts[-3] != "checkpoints":
        return None
    step, attempt = _STEP.fullmatch(parts[-2]), _ATTEMPT.fullmatch(parts[-1])
    return (int(step[1]), int(attempt[1]), folder) if step and attempt else None


def _numbered(names: list[str], pattern: re.Pattern[str]) -> list[tuple[int, str]]:
    """Numbers in the names that match, largest first."""
    return sorted(((int(match[1]), name) for name in names if (match := pattern.fullmatch(name))), reverse=True)


def _model_differences(model: ModelConfig, saved: dict[str, Any]) -> list[str]:
    return _differences(model.model_dump(mode="json"), saved, section="model.")


def _differences(expected: dict[str, Any], found: dict[str, Any], section: str = "") -> list[str]:
    return [
        f"{section}{name} is {found.get(name)!r} there and {value!r} here"
        for name, value in expected.items()
        if found.get(name) != value
    ]
