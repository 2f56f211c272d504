"""From an attempt's events to MLflow: live on the attempt's own run, and on the parent run once a commit covers them.

The parent is the truth: a step gets one value there, from an attempt whose commit counts. The attempt's run is what
happened, uncommitted steps included. MLflow may be away at any time: events wait in memory, and what was not delivered
when the process ended is taken from the events on the store at the next start (`complete_parent`, `complete_attempt`).
"""

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from headrace.errors import HeadraceError, Retryable
from headrace.tracking import POINTS_IN_BATCH, Point

logger = logging.getLogger(__name__)

Event = dict[str, Any]

GROUPS = {"step": "train", "evaluation": "validation", "system": "system"}
"""Which events carry metrics, and the group that MLflow shows them in; the last one has a tab of its own there."""

NOT_METRICS = ("seq", "time", "attempt", "kind", "step")
COMMITTED = "save.committed"

FIRST_DELAY_SECONDS = 0.5
LONGEST_DELAY_SECONDS = 15.0


class PointSink(Protocol):
    """The part of a Tracker that a mirror writes to."""

    def log_points(self, run_id: str, points: Sequence[Point]) -> None:
        """Write points; a repeated one stays one."""

    def last_steps(self, run_id: str) -> dict[str, int]:
        """The highest step of each metric."""


def points_of(event: Event) -> list[Point]:
    """The metric points of an event, with the event's own time; none when it is of another kind."""
    group = GROUPS.get(event["kind"])
    if group is None:
        return []
    moment = round(event["time"] * 1000)
    values = ((key, _number(value)) for key, value in event.items() if key not in NOT_METRICS)
    return [Point(f"{group}/{key}", value, event["step"], moment) for key, value in values if value is not None]


def _number(value: object) -> float | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return float(value)
    return float(value) if value in ("nan", "inf", "-inf") else None


def newer_points(events: Iterable[Event], last_steps: Mapping[str, int]) -> list[Point]:
    """The points above what a run has already, per metric."""
    points = (point for event in events for point in points_of(event))
    return [point for point in points if point.step > last_steps.get(point.key, -1)]


def complete_attempt(sink: PointSink, run_id: str, events: Iterable[Event]) -> None:
    """Write what is missing on the run of one attempt that has ended."""
    sink.log_points(run_id, newer_points(events, sink.last_steps(run_id)))


def complete_parent(sink: PointSink, run_id: str, covered: Iterable[Event], *, rewound_to: int | None = None) -> None:
    """Write what is missing on the parent run; `covered` are the events that commits of the chain cover, in order.

    `rewound_to` is the step behind which a rewind replaced what the parent may have.
    """
    sink.log_points(run_id, newer_points(covered, _kept(sink.last_steps(run_id), rewound_to)))


def _kept(last_steps: dict[str, int], rewound_to: int | None) -> dict[str, int]:
    """The last steps that still hold after a rewind. Above it all are written again: a repeated point stays one."""
    return last_steps if rewound_to is None else {key: min(step, rewound_to) for key, step in last_steps.items()}


class EventMirror:
    """Takes the events of one running attempt and delivers them from its own thread; training never waits for it."""

    def __init__(
        self,
        sink: PointSink,
        *,
        parent_id: str,
        open_attempt: Callable[[], str],
        is_newest: Callable[[], bool],
        rewound_to: int | None = None,
        interval_seconds: float = 2.0,
    ) -> None:
        """`open_attempt` brings MLflow up to date with the store and returns the id of the attempt's own run.

        `is_newest` says whether no later attempt has been claimed: the commits of a fenced attempt do not count.
        `rewound_to` as for `complete_parent`.
        """
        self._sink = sink
        self._parent_id = parent_id
        self._open_attempt = open_attempt
        self._is_newest = is_newest
        self._rewound_to = rewound_to
        self._interval = interval_seconds
        self._attempt_run_id: str | None = None
        self._parent_has: dict[str, int] = {}
        self._events: list[Event] = []
        self._for_attempt: list[Point] = []
        self._uncovered: list[Event] = []
        self._commits: list[int] = []
        self._for_parent: list[Point] = []
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._give_up = threading.Event()
        self._thread = threading.Thread(target=self._run, name="event-mirror", daemon=True)
        self._thread.start()

    @property
    def attempt_run_id(self) -> str | None:
        """Id of the attempt's own run in MLflow; None while MLflow has not answered."""
        return self._attempt_run_id

    def __call__(self, event: Event) -> None:
        """Take one event; returns at once."""
        with self._lock:
            self._events.append(event)
        if event["kind"] == COMMITTED:
            self._wake.set()

    def close(self, timeout_seconds: float) -> bool:
        """Deliver what waits, for at most `timeout_seconds`; True when everything is in MLflow."""
        self._closing.set()
        self._wake.set()
        self._thread.join(timeout_seconds)
        self._give_up.set()
        self._thread.join(1.0)
        waiting = self._events or self._for_attempt or self._commits or self._for_parent
        return not (waiting or self._attempt_run_id is None)

    def _run(self) -> None:
        if not self._until_answered(self._open):
            return
        while not self._give_up.is_set():
            last_round = self._closing.is_set()
            self._take()
            if not self._until_answered(self._deliver):
                return
            if last_round and not self._events:
                return
            self._wake.wait(self._interval)
            self._wake.clear()

    def _until_answered(self, action: Callable[[], None]) -> bool:
        """Do it again while MLflow or the store is away; every other failure ends the mirror, never the training."""
        delay = FIRST_DELAY_SECONDS
        while not self._give_up.is_set():
            try:
                action()
            except Retryable as error:
                if delay == FIRST_DELAY_SECONDS:
                    logger.warning("Metrics wait until MLflow answers, training goes on: %s", error)
                self._give_up.wait(delay)
                delay = min(2 * delay, LONGEST_DELAY_SECONDS)
            except HeadraceError as error:
                logger.error("Metrics are no longer sent to MLflow, training goes on: %s", error)
                self._give_up.set()
            else:
                return True
        return False

    def _open(self) -> None:
        self._attempt_run_id = self._open_attempt()
        self._parent_has = _kept(self._sink.last_steps(self._parent_id), self._rewound_to)

    def _take(self) -> None:
        """Sort what came in: points for the attempt's run, events that a commit may cover, and commits."""
        with self._lock:
            events, self._events = self._events, []
        for event in events:
            points = points_of(event)
            self._for_attempt += points
            if points:
                self._uncovered.append(event)
            if event["kind"] == COMMITTED:
                self._commits.append(event["step"])

    def _cover(self, step: int) -> None:
        covered = [event for event in self._uncovered if event["step"] <= step]
        self._uncovered = [event for event in self._uncovered if event["step"] > step]
        points = newer_points(covered, self._parent_has)
        for point in points:
            self._parent_has[point.key] = max(point.step, self._parent_has.get(point.key, -1))
        self._for_parent += points

    def _deliver(self) -> None:
        if self._attempt_run_id is None:
            return
        while self._commits:
            if self._is_newest():
                self._cover(self._commits[0])
            del self._commits[0]
        for run_id, points in ((self._attempt_run_id, self._for_attempt), (self._parent_id, self._for_parent)):
            while points:
                batch = points[:POINTS_IN_BATCH]
                self._sink.log_points(run_id, batch)
                del points[: len(batch)]
