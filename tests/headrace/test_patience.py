"""A store that comes back in time is not noticed; one that does not is told as it was."""

import time

import pytest

from headrace.errors import ConfigError, StorageUnavailable
from headrace.patience import patiently


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The clock of the module under test: it advances only by pauses."""
    slept: list[float] = []
    monkeypatch.setattr("headrace.patience.time.sleep", slept.append)
    monkeypatch.setattr("headrace.patience.time.monotonic", lambda: sum(slept))
    return slept


class Away:
    """Fails a number of times, then answers."""

    def __init__(self, times: int, kind: type[Exception] = StorageUnavailable) -> None:
        self.left, self.asked, self.kind = times, 0, kind

    def __call__(self) -> str:
        self.asked += 1
        if self.asked <= self.left:
            raise self.kind(f"failure {self.asked}")
        return "answer"


def test_it_is_asked_until_it_answers(pauses: list[float]):
    away = Away(6)
    assert patiently(away, until=1000.0) == "answer"
    assert away.asked == 7
    longest = [0.5, 1, 2, 4, 8, 8]
    assert len(pauses) == 6
    assert all(limit / 2 <= pause <= limit for pause, limit in zip(pauses, longest, strict=True)), pauses


def test_no_pause_goes_beyond_the_time(pauses: list[float]):
    away = Away(1000)
    with pytest.raises(StorageUnavailable, match=r"failure \d+"):
        patiently(away, until=20.0)
    assert 12 < sum(pauses) < 20
    assert away.asked == len(pauses) + 1


def test_without_time_it_is_asked_once(pauses: list[float]):
    away = Away(1)
    with pytest.raises(StorageUnavailable, match="failure 1"):
        patiently(away, until=0.0)
    assert (away.asked, pauses) == (1, [])


def test_another_failure_is_told_at_once(pauses: list[float]):
    with pytest.raises(ConfigError, match="failure 1"):
        patiently(Away(1, ConfigError), until=1000.0)
    assert pauses == []


def test_the_time_is_that_of_the_monotonic_clock(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.undo()
    away = Away(1)
    assert patiently(away, until=time.monotonic() + 5) == "answer"
