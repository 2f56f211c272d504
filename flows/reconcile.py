"""What to do with a flow run whose process may be gone: decisions over plain records, without Prefect and the store.

A flow run is continued by another flow run of the same deployment with the same parameters, which name the same run on
the store. Its idempotency key is derived from the one that it continues, so whoever decides twice makes one.
Resubmitting one that lives after all is harmless: the lease of the run lets one work at a time, and the attempt chain
decides between two. So the evidence may be a guess, and these rules only have to be right nearly always.
"""

import re
from dataclasses import dataclass
from typing import Literal

BUDGET = 10
"""Resubmissions in a row that committed no new step."""

PENDING_SECONDS = 120.0
"""How long a worker may take to start a process."""

START_SECONDS = 180.0
"""How long a process may take from its start until it is present on the store."""

CANCELLING_SECONDS = 60.0
"""How long a process may take to end that is asked to: twice what Prefect's runner gives it before it kills."""

LATE_SECONDS = 60.0
"""How much later than planned a retry may start."""

Presence = Literal["alive", "gone", "silent", "absent"]
"""`gone`: the process of this machine has ended. `silent`: it did not beat while it was watched. `absent`: it is not on
the store: not yet, or not any more."""

Action = Literal["leave", "resubmit", "cancel", "fail"]

FRUITLESS_TAG = "headrace.fruitless:"
STEP_TAG = "headrace.step:"


@dataclass(frozen=True)
class Seen:
    """A flow run, as Prefect and the store show it."""

    state: str
    """Type of the state in Prefect, in capitals."""
    presence: Presence
    seconds_in_state: float
    awaits_retry: bool = False
    seconds_late: float = 0.0
    """How long ago a planned start should have been."""
    cancel_asked: bool = False
    """Whether it ever was Cancelling."""
    continued: bool = False
    """Whether another flow run continues it already."""
    step: int = 0
    """Newest committed step of its run."""
    step_before: int = 0
    """The same when this flow run was made."""
    fruitless: int = 0
    """How many flow runs before this one, in a row, committed nothing new."""
    message: str = ""
    """What its state says."""


@dataclass(frozen=True)
class Decision:
    """What to do, and why, in words that go into the state of the flow run."""

    action: Action
    why: str
    mark_crashed: bool = False
    """Whether Prefect still believes that it runs."""
    fruitless: int = 0
    """For the flow run that continues: how many in a row committed nothing new."""


def decide(seen: Seen, budget: int = BUDGET) -> Decision:
    """What becomes of a flow run."""
    if seen.presence == "alive":
        return Decision("leave", "its process lives")
    if seen.state == "CANCELLING" or (seen.state == "CRASHED" and seen.cancel_asked):
        return _cancelled(seen)
    if seen.state == "CRASHED":
        return Decision("leave", "another flow run continues it") if seen.continued else _again(seen, budget)
    patience = _patience(seen)
    if patience is None:
        return Decision("leave", "there is nothing to do for it")
    if patience > 0:
        return Decision("leave", f"it has {patience:.0f} s more to start")
    return _again(seen, budget)


def _cancelled(seen: Seen) -> Decision:
    early = seen.presence == "absent" and seen.seconds_in_state < CANCELLING_SECONDS
    if early and seen.state == "CANCELLING":
        return Decision("leave", "its process may be saving")
    return Decision("cancel", "It was asked to cancel, and its process has ended.")


def _patience(seen: Seen) -> float | None:
    """Seconds for which a flow run without a sign of life is left alone; None: for ever."""
    known_dead = seen.presence in ("gone", "silent")
    if seen.state == "RUNNING":
        return 0.0 if known_dead else START_SECONDS - seen.seconds_in_state
    if seen.state == "PENDING":
        return 0.0 if known_dead else PENDING_SECONDS - seen.seconds_in_state
    if seen.state == "SCHEDULED" and seen.awaits_retry:
        return LATE_SECONDS - seen.seconds_late
    return None


def _again(seen: Seen, budget: int) -> Decision:
    fruitless = 0 if seen.step > seen.step_before else seen.fruitless + 1
    still_believed = seen.state != "CRASHED"
    ended = _ending(seen)
    if seen.continued:
        return Decision("resubmit", ended, mark_crashed=still_believed, fruitless=fruitless)
    if fruitless > budget:
        last = f" Its last state said: {seen.message}" if seen.message else ""
        return Decision(
            "fail",
            f"{ended} {budget} resubmissions in a row brought the run no further than step {seen.step}.{last} Correct "
            "the cause and trigger the same config again: it continues from the last commit.",
        )
    return Decision("resubmit", ended, mark_crashed=still_believed, fruitless=fruitless)


def _ending(seen: Seen) -> str:
    if seen.state == "CRASHED":
        return "It crashed."
    how = {"gone": "has ended", "silent": "gives no sign of life", "absent": "never came to work or has ended"}
    return f"It was {seen.state.capitalize()}, but its process {how.get(seen.presence, 'is not there')}."


def successor_key(flow_run_id: str) -> str:
    """Idempotency key of the flow run that continues another one: there is never more than one."""
    return f"headrace-continue-{flow_run_id}"


def successor_name(name: str) -> str:
    """`brave-fox` is continued by `brave-fox.2`, and that by `brave-fox.3`."""
    match = re.fullmatch(r"(?P<stem>.+)\.(?P<number>\d+)", name)
    return f"{match['stem']}.{int(match['number']) + 1}" if match else f"{name}.2"


def successor_tags(tags: list[str], decision: Decision, step: int) -> list[str]:
    """The tags of a flow run with the counts for the one that continues it."""
    kept = [tag for tag in tags if not tag.startswith((FRUITLESS_TAG, STEP_TAG))]
    return [*kept, f"{FRUITLESS_TAG}{decision.fruitless}", f"{STEP_TAG}{step}"]


def counts_of(tags: list[str]) -> tuple[int, int]:
    """The counts that a flow run carries: fruitless ones before it, and the step when it was made."""
    return _count(tags, FRUITLESS_TAG), _count(tags, STEP_TAG)


def _count(tags: list[str], prefix: str) -> int:
    found = (tag.removeprefix(prefix) for tag in tags if tag.startswith(prefix))
    return next((int(text) for text in found if text.isdigit()), 0)
