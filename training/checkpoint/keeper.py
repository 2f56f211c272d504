"""Retention beside a running attempt: after a commit, on the side of the supervisor, in a thread of its own.

No rank waits for it and no rank's memory or store connection is used. Whatever fails here costs room, never a step:
it is logged, and the next commit is the next try.
"""

import logging
import queue
import threading
from typing import Any

from headrace.errors import HeadraceError
from headrace.storage import Storage
from training.checkpoint.garbage import carry_out, look
from training.checkpoint.history import Memory
from training.checkpoint.verify import Stopped
from training.run_spec import RunSpec

logger = logging.getLogger(__name__)


class Keeper:
    """Deletes old checkpoints of one run while one attempt of it runs. Call it with the attempt's events; close it."""

    def __init__(self, storage: Storage, run: RunSpec) -> None:
        """`run` carries the execution fields of this attempt: its `checkpoint` section says what is kept."""
        self._storage = storage
        self._run = run
        self._memory = Memory()
        self._commits: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._work, name=f"retention {run.run_id}", daemon=True)
        self._thread.start()

    def __call__(self, event: dict[str, Any]) -> None:
        """Take note of an event of the attempt; never waits."""
        if event["kind"] == "save.committed":
            self._commits.put(True)

    def close(self, seconds: float) -> None:
        """Finish what is due within `seconds`, then stop: afterwards nothing is deleted any more.

        What is under way when they are over ends with its current request to the store, which has a deadline.
        """
        self._commits.put(False)
        self._thread.join(seconds)
        self._stopped.set()
        self._thread.join()

    def _work(self) -> None:
        open_ = True
        while open_:
            due = open_ = self._commits.get()
            while not self._commits.empty():  # several commits are one look
                more = self._commits.get()
                due, open_ = due or more, open_ and more
            if due and not self._stopped.is_set():
                self._collect()

    def _collect(self) -> None:
        try:
            found = look(
                self._storage, self._run, self._run.checkpoint, memory=self._memory, on_bytes=lambda _: self._go_on()
            )
            carry_out(self._storage, self._run, found, go_on=lambda: not self._stopped.is_set())
        except Stopped:
            return
        except HeadraceError as error:
            logger.warning("Old checkpoints of run %s could not be deleted: %s", self._run.run_id, error)

    def _go_on(self) -> None:
        if self._stopped.is_set():
            raise Stopped("The attempt has ended.")
