"""Who may ask a training to stop, and how often it looks."""

import os
import signal
import threading
from types import SimpleNamespace
from uuid import uuid4

import pytest
from prefect.states import Cancelled, Cancelling, Completed, Crashed, Running

from headrace.errors import StorageUnavailable
from tasks.stopping import Every, StopSignals, is_cancelled_in_prefect, is_fenced


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_asks_and_the_second_interrupts(number):
    before = signal.getsignal(number)
    told = []
    with StopSignals(lambda: told.append(1)) as signals:
        assert not signals.asked
        os.kill(os.getpid(), number)
        assert signals.asked
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
    assert told == [1]
    assert signal.getsignal(number) is before


def test_handlers_are_given_back_when_an_exception_passes():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(ValueError, match="x"), StopSignals(lambda: None):
        raise ValueError("x")
    assert signal.getsignal(signal.SIGTERM) is before


def test_in_another_thread_signals_are_left_alone():
    asked = []

    def work() -> None:
        with StopSignals(lambda: None) as signals:
            asked.append(signals.asked)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert asked == [False]


def test_a_question_is_asked_now_and_then(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("tasks.stopping.time.monotonic", lambda: now[0])
    asked = []
    every = Every(15.0, lambda: bool(asked.append(now[0])) or True)
    answers = {}
    for second in range(0, 50, 5):
        now[0] = float(second)
        answers[second] = every()
    assert asked == [15.0, 30.0, 45.0]
    assert [second for second, answer in answers.items() if answer] == [15, 30, 45]


def test_a_later_attempt_fences():
    assert is_fenced(lambda: 4, 3)
    assert not is_fenced(lambda: 3, 3)


def test_a_store_that_is_away_does_not_fence():
    def away() -> int:
        raise StorageUnavailable("503")

    assert not is_fenced(away, 3)


@pytest.mark.parametrize(
    ("state", "stopped"),
    [(Running(), False), (Cancelling(), True), (Cancelled(), True), (Crashed(), False), (Completed(), False)],
    ids=lambda value: getattr(value, "name", None),
)
def test_a_cancellation_in_prefect_is_seen(monkeypatch, state, stopped):
    run_id = uuid4()
    monkeypatch.setattr("tasks.stopping.flow_run", SimpleNamespace(get_id=lambda: str(run_id)))
    monkeypatch.setattr("tasks.stopping.get_client", lambda **_: _Client(run_id, state))
    assert is_cancelled_in_prefect() is stopped


class _Client:
    def __init__(self, run_id, state):
        self._run_id, self._state = run_id, state

    def __enter__(self):
        return self

    def __exit__(self, *_): ...

    def read_flow_run(self, run_id):
        assert run_id == self._run_id
        if isinstance(self._state, Exception):
            raise self._state
        return SimpleNamespace(state=self._state)


def test_a_prefect_that_is_away_does_not_stop_the_training(monkeypatch):
    monkeypatch.setattr("tasks.stopping.flow_run", SimpleNamespace(get_id=lambda: str(uuid4())))
    monkeypatch.setattr("tasks.stopping.get_client", lambda **_: _Client(None, None))
    assert not is_cancelled_in_prefect()


def test_outside_a_flow_there_is_nothing_to_ask(monkeypatch):
    monkeypatch.setattr("tasks.stopping.get_client", lambda **_: pytest.fail("asked"))
    assert not is_cancelled_in_prefect()
