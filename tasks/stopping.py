"""Requests to stop: a signal, a cancellation in Prefect, or a later attempt that was claimed elsewhere.

A training that is asked to stop saves first. Whoever asks a second time does not wait for that.
"""

import logging
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.runtime import flow_run

from headrace.errors import HeadraceError

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PREFECT_SECONDS = 15.0
"""How often Prefect is asked. The runner that would signal us may itself be gone, or may have lost its connection."""

FENCE_SECONDS = 5.0
"""How often the store is asked for a later attempt."""


class StopSignals:
    """Within the block the first signal asks for a stop, and the second one interrupts. Only in the main thread."""

    def __init__(self, on_first: Callable[[], None]) -> None:
        self.asked = False
        self._on_first = on_first
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._ask) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, _number: int, _frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        self._on_first()


class Every:
    """A question that is asked at most every so many seconds; in between the answer is no."""

    def __init__(self, seconds: float, question: Callable[[], bool]) -> None:
        self._seconds = seconds
        self._question = question
        self._next = time.monotonic() + seconds

    def __call__(self) -> bool:
        """The answer, or no when it was asked a moment ago."""
        if time.monotonic() < self._next:
            return False
        answer = self._question()
        self._next = time.monotonic() + self._seconds
        return answer


def is_fenced(newest_attempt: Callable[[], int], attempt: int) -> bool:
    """Whether a later attempt was claimed; a store that is away for a moment says no."""
    try:
        return newest_attempt() > attempt
    except HeadraceError:
        return False


def is_cancelled_in_prefect() -> bool:
    """Whether this flow run is being cancelled, as the server knows it; a server that is away says no.

    A run that is marked as crashed goes on: the mark is a guess from missing heartbeats, and if somebody has started
    another one, the attempt chain decides between the two.
    """
    run_id = flow_run.get_id()
    if run_id is None:
        return False
    try:
        with get_client(sync_client=True) as client:
            state = client.read_flow_run(UUID(str(run_id))).state
    except Exception as error:  # noqa: BLE001 - whatever one question meets, the next one asks again
        logger.info("Prefect could not be asked about this flow run: %s", error)
        return False
    return state is not None and (state.is_cancelling() or state.is_cancelled())
