"""Attempts of one run, and which history they make: the attempt chain.

`<run prefix>/attempts/0003.json` is created once and never written again. It names the checkpoint that the attempt
started from. Claiming the next number fences every older attempt: readers follow the newest attempt to its restore
point, then the attempt that wrote it up to there, and so on. A checkpoint beside that path does not exist, whoever
writes it and whenever: an old attempt that still runs somewhere can do no harm.

    attempt 1   ──10──20──30          (died at 34)
    attempt 2              └──40──50──60     (40: on the chain; 50, 60: written after attempt 3 was claimed)
    attempt 3                   └──50'──60'
"""

import itertools
import logging
import os
import re
import socket
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field, PositiveInt, ValidationError

from headrace.config import Part
from headrace.environment import code_digest, versions
from headrace.errors import DamagedData
from headrace.storage import Storage, json_document
from training.checkpoint.config import CheckpointConfig
from training.health.rewind import SkipRange
from training.run_spec import RestorePoint, RunSpec

logger = logging.getLogger(__name__)

_NAME = re.compile(r"(\d{4,})\.json")


class AttemptRecord(Part):
    """What `attempts/NNNN.json` holds: who launched the process group, with which code, from which checkpoint."""

    format_version: Literal[1] = Field(1, description="version of this document's format")
    attempt: PositiveInt = Field(description="number of the attempt; each is claimed once")
    restore: RestorePoint | None = Field(description="checkpoint the attempt starts from; none: the initial weights")
    skip: tuple[SkipRange, ...] = Field(
        (), description="ranges of the sample order that the run passes over from here on, one for each rewind"
    )
    host: str = Field(description="machine that launched it")
    pid: int = Field(description="process that launched it, on that machine")
    code_digest: str = Field(description="digest of the installed sources of the project")
    versions: dict[str, str] = Field(description="versions of what can change a result")
    layout: dict[str, Any] = Field(description="execution layout of this attempt")
    checkpoint: CheckpointConfig = Field(
        CheckpointConfig(), description="when this attempt saves, and what is kept of it"
    )
    time: float = Field(description="seconds since the epoch when it was claimed; for people, nothing is decided by it")


@dataclass(frozen=True)
class ChainLink:
    """The part of the run's history that one attempt wrote."""

    attempt: int
    after_step: int
    """Steps of this attempt's checkpoints are larger; -1 when it started from the initial weights."""
    last_step: int | None
    """Its last step on the chain; None for the newest attempt, which may still write."""

    def covers(self, step: int) -> bool:
        """Whether this attempt's checkpoint of `step` exists."""
        return step > self.after_step and (self.last_step is None or step <= self.last_step)


def attempt_key(run_prefix: str, attempt: int) -> str:
    """Storage key of an attempt's record."""
    return f"{run_prefix}/attempts/{attempt:04d}.json"


def attempt_numbers(storage: Storage, run_prefix: str) -> list[int]:
    """Numbers of all attempts that were ever claimed, ascending."""
    names = storage.children(f"{run_prefix}/attempts")
    return sorted(int(match[1]) for name in names if (match := _NAME.fullmatch(name)))


def read_attempts(storage: Storage, run_prefix: str) -> list[AttemptRecord]:
    """All attempts of a run, ascending; raises DamagedData when a record cannot be read."""
    return [read_attempt_record(storage, run_prefix, number) for number in attempt_numbers(storage, run_prefix)]


def make_record(
    run: RunSpec, attempt: int, restore: RestorePoint | None, skip: tuple[SkipRange, ...] = ()
) -> AttemptRecord:
    """The record of an attempt that this process is about to claim."""
    return AttemptRecord(
        format_version=1,
        attempt=attempt,
        restore=restore,
        skip=skip,
        host=socket.gethostname(),
        pid=os.getpid(),
        code_digest=code_digest(),
        versions=versions(),
        layout={**run.layout.model_dump(mode="json"), "world_size": run.launch.world_size},
        checkpoint=run.checkpoint,
        time=time.time(),
    )


def claim_attempt(storage: Storage, run_prefix: str, record: AttemptRecord) -> bool:
    """Claim the record's number; False when another process has claimed it (then choose the restore point again)."""
    document = json_document(record.model_dump(mode="json"))
    claimed = storage.create(attempt_key(run_prefix, record.attempt), document)
    if claimed:
        logger.info("Claimed attempt %d, which starts from %s.", record.attempt, _describe(record.restore))
    return claimed


def chain(attempts: Sequence[AttemptRecord]) -> list[ChainLink]:
    """The history that counts, newest attempt first; empty when nothing was ever launched.

    Raises DamagedData when an attempt starts from one that was never claimed or is not older than itself.
    """
    by_number = {record.attempt: record for record in attempts}
    links: list[ChainLink] = []
    current: RestorePoint | None = None
    number = max(by_number, default=None)
    while number is not None:
        restore = by_number[number].restore
        last_step = current.step if current else None
        links.append(ChainLink(number, restore.step if restore else -1, last_step))
        if restore is not None and (restore.attempt >= number or restore.attempt not in by_number):
            raise DamagedData(
                f"Attempt {number} says that it started from attempt {restore.attempt}, but the attempts of this run "
                f"are {', '.join(map(str, sorted(by_number)))}. Restore the missing file below attempts/."
            )
        current = restore
        number = restore.attempt if restore else None
    return links


def rewound_to(attempts: Sequence[AttemptRecord]) -> int | None:
    """The earliest step that a rewind of this run started from again; None when it never went back."""
    restarts = [
        record.restore.step if record.restore else 0
        for before, record in itertools.pairwise(attempts)
        if record.skip != before.skip
    ]
    return min(restarts, default=None)


def is_on_chain(links: Iterable[ChainLink], *, attempt: int, step: int) -> bool:
    """Whether the checkpoint of `step` that `attempt` wrote counts."""
    return any(link.attempt == attempt and link.covers(step) for link in links)


def newest_attempt(storage: Storage, run_prefix: str) -> int:
    """The number that fences all others; 0 when nothing was launched."""
    return max(attempt_numbers(storage, run_prefix), default=0)


def read_attempt_record(storage: Storage, run_prefix: str, number: int) -> AttemptRecord:
    """The record of one attempt. Raises DamagedData when it cannot be read."""
    key = attempt_key(run_prefix, number)
    try:
        record = AttemptRecord.model_validate(storage.read_json(key))
    except DamagedData as error:
        raise DamagedData(
            f"{error} The history of the run cannot be read without it: bring it back from a copy, or start a new run "
            "under another name, with training.init_from: hf://FOLDER of an export of this one."
        ) from error
    except ValidationError as error:
        raise DamagedData(f"{storage.url(key)} is not the record of an attempt: {error}") from error
    if record.attempt != number:
        raise DamagedData(f"{storage.url(key)} is the record of attempt {record.attempt}, not of {number}.")
    return record


def _describe(restore: RestorePoint | None) -> str:
    return f"step {restore.step} of attempt {restore.attempt}" if restore else "the initial weights"
