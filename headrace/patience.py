"""Waiting out a store that is away for a while."""

import logging
import random
import time
from collections.abc import Callable
from typing import TypeVar

from headrace.errors import StorageUnavailable

logger = logging.getLogger(__name__)

T = TypeVar("T")

FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 8.0


def patiently(action: Callable[[], T], until: float) -> T:
    """Return what `action` returns; do it again after StorageUnavailable, with growing pauses of random length.

    Raises the last StorageUnavailable when time.monotonic() would be past `until` after the next pause. The action
    itself must end: nothing here interrupts it.
    """
    longest = FIRST_PAUSE_SECONDS
    while True:
        try:
            return action()
        except StorageUnavailable as error:
            # Random: processes that lost the store together must not come back together.
            pause = random.uniform(0.5, 1.0) * longest
            if time.monotonic() + pause >= until:
                raise
            logger.warning("Trying again in %.1f s: %s", pause, error)
            time.sleep(pause)
        longest = min(2 * longest, LONGEST_PAUSE_SECONDS)
