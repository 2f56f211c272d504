"""How far a training is, on the page of its flow run: a progress artifact, written by a thread of its own.

Training never waits for it, and a server that is away costs only the picture: the next write brings it up to date.
"""

import logging
import threading
from types import TracebackType
from typing import Self
from uuid import UUID

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate
from prefect.exceptions import PrefectException
from prefect.runtime import flow_run, task_run

logger = logging.getLogger(__name__)

KEY = "training"
INTERVAL_SECONDS = 5.0
CLOSE_SECONDS = 5.0


class ProgressPage:
    """Shows `done` of `total` within the block, on the flow run that this process works for; without one, nowhere."""

    def __init__(self, total: int, *, interval_seconds: float = INTERVAL_SECONDS) -> None:
        self._total = total
        self._interval = interval_seconds
        self._newest: tuple[float, str] | None = None
        self._shown: tuple[float, str] | None = None
        self._closing = threading.Event()
        run_id, task_id = flow_run.get_id(), task_run.get_id()
        self._flow_run = UUID(str(run_id)) if run_id else None
        self._task_run = UUID(str(task_id)) if task_id else None
        self._thread = threading.Thread(target=self._run, name="progress-page", daemon=True)

    def show(self, done: int, text: str) -> None:
        """Say how far it is; returns at once."""
        self._newest = (round(100 * done / self._total, 1), text)

    def __enter__(self) -> Self:
        """Begin to write."""
        if self._flow_run is not None:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Write what was said last, when the server answers at once."""
        self._closing.set()
        if self._flow_run is not None:
            self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        artifact: UUID | None = None
        with get_client(sync_client=True) as client:
            closing = False
            while not closing:
                closing = self._closing.wait(self._interval)  # looked at before the value: the last one is written, too
                newest = self._newest
                if newest is None or newest == self._shown:
                    continue
                try:
                    artifact = self._write(client, artifact, *newest)
                    self._shown = newest
                except (httpx.HTTPError, PrefectException) as problem:
                    logger.info("The progress is shown later: %s", problem)

    def _write(self, client: SyncPrefectClient, artifact: UUID | None, percent: float, text: str) -> UUID:
        if artifact is not None:
            client.update_artifact(artifact, ArtifactUpdate(data=percent, description=text))
            return artifact
        new = ArtifactCreate(
            key=KEY,
            type="progress",
            data=percent,
            description=text,
            flow_run_id=self._flow_run,
            task_run_id=self._task_run,
        )
        return client.create_artifact(new).id
