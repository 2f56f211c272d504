"""Where the time of a run went: every second of every attempt in one bucket, from the event logs alone.

    claim            started        ◄──── steps, evaluations, saves ────►  last event      ended   next claim
      ├── start-up ───────────────────┤ productive | replayed | data | ... ├──── dead ──────┤─ queue ─┤

Each of `step`, `evaluation`, `save.staged` and the last save says how long it took, up to its own time; what lies
between them is *unattributed*, and shown. A step is productive when the attempt chain covers it; a step that a later
attempt did again, or passed over, is *replayed*. Times are the wall clocks of the machines that wrote them.
"""

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from training.launch.attempts import AttemptRecord, ChainLink, chain

Event = dict[str, Any]

BUCKETS = (
    "productive",
    "replayed",
    "save_stall",
    "data_wait",
    "start_up",
    "evaluation",
    "queue",
    "dead",
    "unattributed",
)

ENDED = "attempt.ended"


@dataclass(frozen=True)
class Goodput:
    """The account of a run."""

    seconds: dict[str, float]
    """Seconds by bucket, in the order of BUCKETS; their sum is `wall_seconds`."""
    wall_seconds: float
    """From the first claim to the last sign of the last attempt."""
    device_seconds: float
    """Seconds of all attempts (not of the queue between them), times their ranks."""
    failures: int
    """Attempts that did not end by finishing or by being asked to stop."""
    advice: "SaveAdvice | None"
    why_no_advice: str | None
    """One line; None when there is advice."""

    @property
    def productive_share(self) -> float:
        """Productive seconds as a share of the wall."""
        return self.seconds["productive"] / self.wall_seconds if self.wall_seconds else 0.0


@dataclass(frozen=True)
class SaveAdvice:
    """The interval between saves that loses least, and what it was computed from."""

    steps: int
    seconds: float
    save_seconds: float
    """Seconds for which one save stops the training, median."""
    durable_seconds: float
    """From the copy of the state to its commit, median: work that a failure loses beyond the interval."""
    between_failures_seconds: float
    """Training time for each failure; one failure is assumed when none was seen."""
    step_seconds: float


def account(attempts: Sequence[AttemptRecord], events: Mapping[int, Sequence[Event]]) -> Goodput:
    """The account of a run from its attempts, ascending, and the events of each. No attempts: all zero."""
    seconds = dict.fromkeys(BUCKETS, 0.0)
    links = {link.attempt: link for link in chain(attempts)}
    spans = [_span(record, events.get(record.attempt, ())) for record in attempts]
    for record, (start, end) in zip(attempts, spans, strict=True):
        told = [event for event in events.get(record.attempt, ()) if event["time"] <= end]
        for bucket, value in _attempt(told, links.get(record.attempt), start, end).items():
            seconds[bucket] += value
    for (_, end), (start, _) in itertools.pairwise(spans):
        seconds["queue"] += max(0.0, start - end)
    failures = sum(_failed(record, events, last=record is attempts[-1]) for record in attempts)
    device_seconds = sum(
        (end - start) * int(record.layout.get("world_size", 1))
        for record, (start, end) in zip(attempts, spans, strict=True)
    )
    running = sum(end - start for start, end in spans)
    advice = _advice([event for told in events.values() for event in told], running / max(1, failures))
    return Goodput(
        seconds=seconds,
        wall_seconds=sum(seconds.values()),
        device_seconds=device_seconds,
        failures=failures,
        advice=advice if isinstance(advice, SaveAdvice) else None,
        why_no_advice=advice if isinstance(advice, str) else None,
    )


def _span(record: AttemptRecord, events: Sequence[Event]) -> tuple[float, float]:
    """From the claim to the end that the launcher saw, else to the last event."""
    return record.time, max([record.time, *(event["time"] for event in events)])


def _attempt(events: Sequence[Event], link: ChainLink | None, start: float, end: float) -> dict[str, float]:
    """The buckets of one attempt; their sum is `end - start`."""
    seconds = dict.fromkeys(BUCKETS, 0.0)
    worked_from, worked_to = None, start
    for event in events:
        spent = _spent(event, link)
        if not spent:
            continue
        begun = event["time"] - sum(spent.values())
        if worked_from is None:
            worked_from = max(start, begun)
            seconds["start_up"] = worked_from - start
        # What overlaps (a clock that was set back) counts once: the sum must stay the wall.
        available = max(0.0, event["time"] - max(worked_to, worked_from))
        share = min(1.0, available / sum(spent.values())) if sum(spent.values()) else 0.0
        for bucket, value in spent.items():
            seconds[bucket] += value * share
        worked_to = max(worked_to, event["time"])
    if worked_from is None:
        seconds["start_up" if not _has_ended(events) else "dead"] = end - start
        return seconds
    seconds["dead"] = max(0.0, end - worked_to)
    seconds["unattributed"] = max(0.0, end - start - sum(seconds.values()))
    return seconds


def _spent(event: Event, link: ChainLink | None) -> dict[str, float]:
    """Seconds that the event says it took, by bucket."""
    kind = event["kind"]
    if kind == "step":
        if link is None or not link.covers(event["step"]):
            return {"replayed": event["step_seconds"]}
        return {"productive": event["step_seconds"] - event["data_seconds"], "data_wait": event["data_seconds"]}
    if kind == "batch.skipped":
        return {"replayed": event["seconds"]}
    if kind == "evaluation":
        return {"evaluation": event["seconds"]}
    if kind == "save.staged":
        return {"save_stall": event["blocking_seconds"]}
    if kind in ("finished", "stopped"):
        return {"save_stall": event.get("save_seconds", 0.0)}  # logs of before it was measured do not have it
    return {}


def _has_ended(events: Sequence[Event]) -> bool:
    return any(event["kind"] == ENDED for event in events)


def _failed(record: AttemptRecord, events: Mapping[int, Sequence[Event]], *, last: bool) -> bool:
    """Whether the attempt ended otherwise than by finishing or stopping; the last one may still run."""
    kinds = [event["kind"] for event in events.get(record.attempt, ())]
    if "finished" in kinds or "stopped" in kinds:
        return False
    return ENDED in kinds or not last


def _advice(events: Sequence[Event], between_failures: float) -> SaveAdvice | str:
    """The best interval of Young (1974) and Daly (2006), to first order: sqrt(2 * cost of a save * time per failure).

    At most one save is in flight, so an interval shorter than a save takes to become durable would only skip saves.
    The answer is why there is none, before enough was seen.
    """
    saves = [event["blocking_seconds"] for event in events if event["kind"] == "save.staged"]
    commits = [event["seconds"] for event in events if event["kind"] == "save.committed"]
    steps = [event["step_seconds"] for event in events if event["kind"] == "step"]
    if min(len(saves), len(commits), len(steps)) < 2:
        return (
            "no interval between saves is advised before two steps and two committed saves beside the last were seen: "
            f"{len(steps)} and {min(len(saves), len(commits))} so far"
        )
    cost, durable, step = statistics.median(saves), statistics.median(commits), statistics.median(steps)
    if step <= 0 or between_failures <= 0:
        return "no interval between saves is advised: by the clocks of the run no time went by"
    seconds = max(math.sqrt(2 * cost * between_failures), durable, step)
    return SaveAdvice(
        steps=max(1, round(seconds / step)),
        seconds=seconds,
        save_seconds=cost,
        durable_seconds=durable,
        between_failures_seconds=between_failures,
        step_seconds=step,
    )
