"""Events to MLflow: the parent gets each step once, and training never waits."""

import threading
import time
from collections.abc import Callable, Sequence

import pytest

from headrace.errors import StorageUnavailable, Terminal, TrackingUnavailable
from headrace.mirror import EventMirror, complete_attempt, complete_parent, newer_points, points_of
from headrace.tracking import Point

WAIT_SECONDS = 20


class FakeTracking:
    """Runs as MLflow keeps them: the same point twice is one point. Can be away."""

    def __init__(self) -> None:
        self.runs: dict[str, set[Point]] = {}
        self.calls = 0
        self.away = threading.Event()
        self.refuse = False
        self.fail_after_writing = False

    def log_points(self, run_id: str, points: Sequence[Point]) -> None:
        self.calls += 1
        if self.away.is_set():
            raise TrackingUnavailable("away")
        if self.refuse:
            raise Terminal("no such run")
        assert len(points) <= 1000
        self.runs.setdefault(run_id, set()).update(points)
        if self.fail_after_writing:
            self.fail_after_writing = False
            raise TrackingUnavailable("the answer was lost")

    def last_steps(self, run_id: str) -> dict[str, int]:
        if self.away.is_set():
            raise TrackingUnavailable("away")
        last: dict[str, int] = {}
        for point in self.runs.get(run_id, set()):
            last[point.key] = max(point.step, last.get(point.key, -1))
        return last

    def steps(self, run_id: str, key: str = "train/loss") -> list[int]:
        return sorted(point.step for point in self.runs.get(run_id, set()) if point.key == key)


def step(number: int, *, attempt: int = 1, loss: float = 1.0) -> dict:
    return {
        "seq": number,
        "time": attempt * 10_000.0 + number,
        "attempt": attempt,
        "kind": "step",
        "step": number,
        "loss": loss,
    }


def committed(number: int, *, attempt: int = 1) -> dict:
    return {"seq": 0, "time": 0.0, "attempt": attempt, "kind": "save.committed", "step": number}


@pytest.fixture
def tracking() -> FakeTracking:
    return FakeTracking()


@pytest.fixture
def start(tracking: FakeTracking, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("headrace.mirror.FIRST_DELAY_SECONDS", 0.01)
    monkeypatch.setattr("headrace.mirror.LONGEST_DELAY_SECONDS", 0.05)
    started = []

    def make(is_newest: Callable[[], bool] = lambda: True, open_attempt: Callable[[], str] = lambda: "child"):
        mirror = EventMirror(
            tracking, parent_id="parent", open_attempt=open_attempt, is_newest=is_newest, interval_seconds=0.01
        )
        started.append(mirror)
        return mirror

    yield make
    for mirror in started:
        mirror.close(0.1)


# ----------------------------------------------------------------------------------------------------------- points


def test_points_of_a_step_carry_its_own_time_and_only_numbers():
    event = step(7, loss=2.5) | {"note": "text", "flag": True, "grad_norm": "nan", "other": "inf"}
    points = points_of(event)
    assert points[0] == Point("train/loss", 2.5, 7, 10_007_000)
    assert [(p.key, str(p.value)) for p in points[1:]] == [("train/grad_norm", "nan"), ("train/other", "inf")]


def test_evaluations_are_a_group_of_their_own():
    assert points_of(step(3) | {"kind": "evaluation"})[0].key == "validation/loss"
    assert points_of(committed(3)) == []


def test_newer_points_are_above_what_each_metric_has():
    events = [step(n) | {"extra": 1} for n in range(1, 5)]
    points = newer_points(events, {"train/loss": 3, "train/extra": 1})
    assert [(p.key, p.step) for p in points] == [
        ("train/extra", 2),
        ("train/extra", 3),
        ("train/loss", 4),
        ("train/extra", 4),
    ]


def test_what_is_completed_twice_is_there_once(tracking):
    events = [step(n) for n in range(1, 2_501)]
    for _ in range(2):
        for start_ in range(0, len(events), 900):
            complete_attempt(_Batched(tracking), "child", events[: start_ + 900])
    assert tracking.steps("child") == list(range(1, 2_501))


class _Batched:
    """Splits as the Tracker does."""

    def __init__(self, inner: FakeTracking) -> None:
        self.inner = inner
        self.last_steps = inner.last_steps

    def log_points(self, run_id: str, points: Sequence[Point]) -> None:
        for start in range(0, len(points), 1000):
            self.inner.log_points(run_id, points[start : start + 1000])


def test_a_step_of_a_second_attempt_does_not_get_a_second_value(tracking):
    complete_parent(tracking, "parent", [step(n, attempt=1) for n in range(1, 11)])
    # attempt 2 went back behind a damaged checkpoint, to step 5: its events of 6..10 have other times
    again = [step(n, attempt=1) for n in range(1, 6)] + [step(n, attempt=2) for n in range(6, 15)]
    complete_parent(tracking, "parent", again)
    assert tracking.steps("parent") == list(range(1, 15))


def test_after_a_rewind_the_parent_gets_what_replaces_its_values(tracking):
    complete_parent(tracking, "parent", [step(n, attempt=1) for n in range(1, 11)])
    # attempt 2 passes over what spoilt attempt 1: its steps 6..8 are others, and steps 9 and 10 do not exist (yet)
    again = [step(n, attempt=1) for n in range(1, 6)] + [step(n, attempt=2) for n in range(6, 9)]
    for _ in range(2):
        complete_parent(tracking, "parent", again, rewound_to=5)
    assert tracking.steps("parent") == [1, 2, 3, 4, 5, 6, 6, 7, 7, 8, 8, 9, 10]


# ------------------------------------------------------------------------------------------------------ live mirror


def test_the_attempt_gets_everything_and_the_parent_what_is_committed(start, tracking):
    mirror = start()
    for number in range(1, 8):
        mirror(step(number))
    mirror(committed(5))
    assert mirror.close(WAIT_SECONDS)
    assert mirror.attempt_run_id == "child"
    assert tracking.steps("child") == list(range(1, 8))
    assert tracking.steps("parent") == list(range(1, 6))


def test_the_parent_keeps_what_it_has(start, tracking):
    complete_parent(tracking, "parent", [step(n, attempt=1) for n in range(1, 6)])
    mirror = start()
    for number in range(4, 9):
        mirror(step(number, attempt=2))
    mirror(committed(8, attempt=2))
    assert mirror.close(WAIT_SECONDS)
    assert tracking.steps("parent") == list(range(1, 9))
    assert tracking.steps("child") == list(range(4, 9))


def test_commits_of_a_fenced_attempt_do_not_count(start, tracking):
    newest = [True]
    mirror = start(is_newest=lambda: newest[0])
    mirror(step(1))
    mirror(committed(1))
    until(lambda: tracking.steps("parent") == [1])
    newest[0] = False
    mirror(step(2))
    mirror(committed(2))
    assert mirror.close(WAIT_SECONDS)
    assert tracking.steps("parent") == [1]
    assert tracking.steps("child") == [1, 2]


def test_many_points_go_in_batches_that_mlflow_takes(start, tracking):
    mirror = start()
    for number in range(1, 3_001):
        mirror(step(number))
    mirror(committed(3_000))
    assert mirror.close(WAIT_SECONDS)
    assert tracking.steps("parent") == list(range(1, 3_001))
    assert tracking.calls < 50


def test_training_goes_on_while_mlflow_is_away_and_nothing_is_lost(start, tracking):
    tracking.away.set()
    mirror = start()
    before = time.monotonic()
    for number in range(1, 101):
        mirror(step(number))
    mirror(committed(100))
    assert time.monotonic() - before < 5
    until(lambda: tracking.calls >= 0)
    assert tracking.runs == {}
    tracking.away.clear()
    until(lambda: tracking.steps("parent") == list(range(1, 101)))
    assert mirror.close(WAIT_SECONDS)
    assert tracking.steps("child") == list(range(1, 101))


def test_a_lost_answer_is_repeated_and_stored_once(start, tracking):
    tracking.fail_after_writing = True
    mirror = start()
    for number in range(1, 11):
        mirror(step(number))
    mirror(committed(10))
    assert mirror.close(WAIT_SECONDS)
    assert tracking.steps("parent") == list(range(1, 11))


def test_it_says_so_when_not_everything_was_delivered(start, tracking, caplog):
    tracking.away.set()
    mirror = start()
    mirror(step(1))
    assert not mirror.close(0.2)
    assert [r.getMessage() for r in caplog.records] == ["Metrics wait until MLflow answers, training goes on: away"]


def test_a_store_that_is_away_is_waited_for_as_well(start, tracking):
    answers = iter([StorageUnavailable("away"), StorageUnavailable("away"), True])

    def is_newest() -> bool:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    mirror = start(is_newest=is_newest)
    mirror(step(1))
    mirror(committed(1))
    assert mirror.close(WAIT_SECONDS)
    assert tracking.steps("parent") == [1]


def test_a_refusal_ends_the_mirror_and_not_the_training(start, tracking, caplog):
    tracking.refuse = True
    mirror = start()
    mirror(step(1))
    until(lambda: any("no longer sent" in r.getMessage() for r in caplog.records))
    mirror(step(2))
    assert not mirror.close(WAIT_SECONDS)


def test_the_attempt_is_opened_again_until_mlflow_answers(start, tracking):
    tries = []

    def open_attempt() -> str:
        tries.append(1)
        if len(tries) < 3:
            raise TrackingUnavailable("away")
        return "late"

    mirror = start(open_attempt=open_attempt)
    assert mirror.attempt_run_id is None or mirror.attempt_run_id == "late"
    mirror(step(1))
    assert mirror.close(WAIT_SECONDS)
    assert mirror.attempt_run_id == "late"
    assert tracking.steps("late") == [1]


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not true():
        assert time.monotonic() < deadline, "it did not become true"
        time.sleep(0.01)
