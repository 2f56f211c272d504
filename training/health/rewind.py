"""Going back before a bad stretch of batches: a new attempt from an older checkpoint, which passes over them.

The attempt that meets the bad batch writes `rewinds/NNNN.json` under its own number, create-only, and ends. The next
attempt takes it over into its record, `attempts/NNNN.json`, and so do all later ones: from then on it is part of the
history. A rewind that an attempt writes after the next one was claimed is read by nobody.

    attempt 1   ──10──20──30──x        x: bad; steps 25 .. 34 saw the range [24 G, 34 G) of the sample order
    attempt 2          └────┤skip├──30'──40'     starts from 20, trains 21 .. 24 again, passes over the range
"""

from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveInt, ValidationError

from headrace.config import Part
from headrace.errors import AttemptFailed, DamagedData, NotFound
from headrace.storage import Storage, json_document


class Rewind(AttemptFailed):
    """This attempt met a batch that the run goes back for; the next one starts before it."""


class SkipRange(Part):
    """Positions of the sample order that the run passes over: `start` up to, not including, `stop`."""

    start: NonNegativeInt = Field(description="first sequence that is passed over")
    stop: PositiveInt = Field(description="first sequence after them")

    def reaches(self, position: int) -> bool:
        """Whether a batch that would start at `position` is passed over."""
        return self.start <= position < self.stop


class RewindRequest(Part):
    """`rewinds/NNNN.json`: what attempt NNNN asks of the next one."""

    format_version: Literal[1] = Field(1, description="version of this document's format")
    attempt: PositiveInt = Field(description="the attempt that met the bad batch")
    step: PositiveInt = Field(description="the step that it would have been")
    reason: str = Field(description="what was wrong, for people")
    last_good_step: NonNegativeInt = Field(description="the next attempt starts from this step or before")
    skip: SkipRange = Field(description="what it passes over")


def rewind_key(run_prefix: str, attempt: int) -> str:
    """Storage key of the request of an attempt."""
    return f"{run_prefix}/rewinds/{attempt:04d}.json"


def write_rewind(storage: Storage, run_prefix: str, request: RewindRequest) -> None:
    """Store a request; the first one of an attempt stands."""
    storage.create(rewind_key(run_prefix, request.attempt), json_document(request.model_dump(mode="json")))


def rewound_by(storage: Storage, run_prefix: str) -> set[int]:
    """Attempts that asked the next one to go back."""
    return {int(name.removesuffix(".json")) for name in storage.children(f"{run_prefix}/rewinds")}


def read_rewind(storage: Storage, run_prefix: str, attempt: int) -> RewindRequest | None:
    """What an attempt asked of the next one; None when it did not. Raises DamagedData."""
    key = rewind_key(run_prefix, attempt)
    try:
        return RewindRequest.model_validate(storage.read_json(key))
    except NotFound:
        return None
    except ValidationError as error:
        raise DamagedData(f"{storage.url(key)} is not a rewind of this version: {error}") from error
