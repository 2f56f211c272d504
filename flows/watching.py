"""Watching a flow run to its end through the API alone, whatever happens to the API meanwhile.

Only requests, no websockets: one that dies looks like an end. Only a final state is an answer. A crash is not the end
where the reconciler is scheduled: it continues the run as another flow run, which is then watched instead.
"""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from flows.command import stopped_by_signals
from flows.reconcile import successor_key
from headrace.errors import Cancelled, NotFound, Retryable, Terminal
from headrace.terminal import StageProgress
from headrace.terminal import Terminal as Shown

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.objects import Artifact, FlowRun

T = TypeVar("T")

POLL_SECONDS = 2.0
OUTAGE_SECONDS = 600.0
"""How long the API may be away; a server that is restarted or moved needs minutes."""

NO_WORKER_SECONDS = 30.0
"""After so long in the queue it is said when no worker polls it."""

CANCEL_SECONDS = 40.0
"""A run that is cancelled has 30 seconds to save and end."""

CONTINUE_SECONDS = 120.0
"""How long a crashed run may wait for the reconciler."""

RECONCILER = "reconcile"


class Watch:
    """One flow run, and those that continue it."""

    def __init__(
        self,
        client: "SyncPrefectClient",
        flow_run: "FlowRun",
        terminal: Shown,
        *,
        timeout: float | None = None,
        poll: float = POLL_SECONDS,
        outage: float = OUTAGE_SECONDS,
    ) -> None:
        """`timeout` bounds the whole wait, `outage` each absence of the API; all in seconds."""
        self._client = client
        self._run = flow_run
        self._terminal = terminal
        self._poll = poll
        self._outage = outage
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout if timeout is not None else None
        self._away_since: float | None = None

    def to_the_end(self) -> dict[str, Any]:
        """Wait for the end and return the run's summary as a document; a signal cancels the run.

        Raises Terminal when it failed, Cancelled when it was cancelled, Retryable when the wait ended before the run.
        """
        with stopped_by_signals():
            try:
                with self._terminal.stage(str(self._run.name)) as stage:
                    self._wait(stage)
                    stage.conclude(_state(self._run))
            except KeyboardInterrupt:
                raise self._cancel() from None
        return self._result()

    def _wait(self, stage: StageProgress) -> None:
        shown: dict[str, Any] = {}
        queued_since, told = time.monotonic(), False
        while True:
            self._run = self._ask(lambda: self._client.read_flow_run(self._run.id))
            state = self._run.state
            if state is not None and state.is_final():
                follower = self._follower() if state.is_crashed() else None
                if follower is None and self._run.state is not None and not self._run.state.is_final():
                    continue  # somebody started it again
                if follower is None:
                    return
                stage.note(f"{self._run.name} crashed; {follower.name} continues it: {_page(follower)}")
                self._run, queued_since = follower, time.monotonic()
                continue
            if (now_shown := self._progress()) != shown:
                stage.update(**now_shown)
                shown = now_shown
            if state is not None and not (state.is_scheduled() or state.is_pending()):
                queued_since = time.monotonic()
            elif not told and time.monotonic() - queued_since > NO_WORKER_SECONDS:
                told = self._tell_when_nobody_works(stage)
            self._sleep()

    def _progress(self) -> dict[str, Any]:
        """What is known of a running flow run: its state, the stage that runs, and how far that is."""
        from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId

        of_run = FlowRunFilter(id=FlowRunFilterId(any_=[self._run.id]))
        tasks = self._ask(lambda: self._client.read_task_runs(flow_run_filter=of_run))
        running = [task.name.rsplit("-", 1)[0] for task in tasks if task.state and task.state.is_running()]
        shown: dict[str, Any] = {"state": _state(self._run)}
        if running:
            shown["stage"] = "+".join(dict.fromkeys(running))
        bars = [a for a in self._artifacts() if a.type == "progress" and isinstance(a.data, int | float)]
        if running and bars:
            shown["progress"] = f"{bars[0].data:.0f}%"
        return shown

    def _artifacts(self) -> "list[Artifact]":
        """All artifacts of the flow run, the newest first."""
        from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
        from prefect.client.schemas.sorting import ArtifactSort

        of_run = FlowRunFilter(id=FlowRunFilterId(any_=[self._run.id]))
        return self._ask(
            lambda: self._client.read_artifacts(flow_run_filter=of_run, sort=ArtifactSort.UPDATED_DESC, limit=50)
        )

    def _follower(self) -> "FlowRun | None":
        """The flow run that continues a crashed one; waits for it where a reconciler is scheduled."""
        found = self._successor()
        if found is not None or not self._is_reconciled():
            return found
        self._terminal.note(f"{self._run.name} crashed; the reconciler continues it within a minute.")
        deadline = time.monotonic() + CONTINUE_SECONDS
        while found is None and time.monotonic() < deadline:
            self._sleep()
            found = self._successor()
            self._run = self._ask(lambda: self._client.read_flow_run(self._run.id))
            if self._run.state is None or not self._run.state.is_crashed():
                break  # given up, or it was alive and has ended by itself
        return found

    def _successor(self) -> "FlowRun | None":
        from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterIdempotencyKey

        key = FlowRunFilterIdempotencyKey(any_=[successor_key(str(self._run.id))])
        found = self._ask(lambda: self._client.read_flow_runs(flow_run_filter=FlowRunFilter(idempotency_key=key)))
        return found[0] if found else None

    def _is_reconciled(self) -> bool:
        from prefect.client.schemas.filters import FlowFilter, FlowFilterName

        of_flow = FlowFilter(name=FlowFilterName(any_=[RECONCILER]))
        deployments = self._ask(lambda: self._client.read_deployments(flow_filter=of_flow))
        return any(not d.paused and any(s.active for s in d.schedules) for d in deployments)

    def _tell_when_nobody_works(self, stage: StageProgress) -> bool:
        pool = self._run.work_pool_name
        if pool is None:
            stage.note("the deployment has no work pool, so nothing starts this run")
            return True
        workers = self._ask(lambda: self._client.read_workers_for_work_pool(pool))
        if any(str(getattr(worker.status, "value", worker.status)) == "ONLINE" for worker in workers):
            return False
        stage.note(f"no worker polls the work pool {pool!r}; start one: prefect worker start --pool {pool}")
        return True

    def _cancel(self) -> Cancelled:
        """Cancel the flow run and see it end; the error to leave with."""
        from prefect.client.schemas.objects import State
        from prefect.states import Cancelling

        name, page = self._run.name, _page(self._run)
        self._terminal.note(f"Cancelling {name}; it saves first.")
        self._deadline = time.monotonic() + CANCEL_SECONDS
        try:
            wish: State[Any] = Cancelling(message="headrace trigger was stopped.")
            self._ask(lambda: self._client.set_flow_run_state(self._run.id, wish))
            while not (self._run.state and self._run.state.is_final()):
                self._sleep()
                self._run = self._ask(lambda: self._client.read_flow_run(self._run.id))
        except Retryable:
            return Cancelled(f"Stopped. The flow run {name} was asked to cancel and has not ended yet: {page}")
        except KeyboardInterrupt:
            return Cancelled(f"Stopped without waiting. Whether the flow run {name} was cancelled, see {page}")
        return Cancelled(f"Stopped. The flow run {name} is {_state(self._run)}: {page}")

    def _result(self) -> dict[str, Any]:
        state, page = self._run.state, _page(self._run)
        message = " ".join((state.message or "").split()) if state else ""
        if state is None or state.is_cancelled():
            raise Cancelled(f"The flow run {self._run.name} was cancelled: {message or 'no reason given'} See {page}")
        if not state.is_completed():
            raise Terminal(f"The flow run {self._run.name} is {state.name}: {message or 'no reason given'} See {page}")
        newest: dict[str, Any] = {}
        for artifact in reversed(self._artifacts()):
            newest[artifact.key or str(artifact.id)] = artifact.data
        return {
            "flow_run_id": str(self._run.id),
            "flow_run": self._run.name,
            "state": state.name,
            "pages": {"Prefect": page, **_links(newest)},
            "stages": table(newest.get("stages")),
            "summary": newest.get("summary"),
        }

    def _ask(self, question: Callable[[], T]) -> T:
        """The answer of the API, however often it must be asked. Raises NotFound for what it does not know."""
        import httpx
        from prefect.exceptions import ObjectNotFound

        while True:
            try:
                answer = question()
            except ObjectNotFound:
                raise NotFound(f"The Prefect server has no flow run {self._run.id} any more.") from None
            except httpx.HTTPStatusError as error:
                if error.response.status_code < 500 and error.response.status_code != 429:
                    raise
                self._be_patient()
            except httpx.TransportError:
                self._be_patient()
            else:
                if self._away_since is not None:
                    self._terminal.note("The Prefect API answers again.")
                self._away_since = None
                return answer

    def _be_patient(self) -> None:
        now = time.monotonic()
        if self._away_since is None:
            self._away_since = now
            self._terminal.note("The Prefect API does not answer; asking again. The run goes on without it.")
        if now - self._away_since > self._outage:
            raise Retryable(
                f"The Prefect API has not answered for {self._outage:.0f} s. The run goes on without it; give the "
                "same command with the same idempotency key to watch it again."
            )
        self._sleep()

    def _sleep(self) -> None:
        if self._deadline is not None and time.monotonic() > self._deadline:
            raise Retryable(
                f"The flow run {self._run.name} is still {_state(self._run)} after {self._timeout or 0:.0f} s "
                f"(--timeout). It goes on: {_page(self._run)}"
            )
        time.sleep(self._poll)


def table(data: Any) -> list[dict[str, Any]]:
    """The rows of a table artifact, which the server keeps as JSON text."""
    import json

    if isinstance(data, str):
        data = json.loads(data)
    return [dict(row) for row in data] if isinstance(data, list) else []


def _links(artifacts: dict[str, Any]) -> dict[str, str]:
    """The pages that link artifacts name: `[MLflow](http://…)` in markdown."""
    found = {}
    for data in artifacts.values():
        text, opened, rest = data.partition("](") if isinstance(data, str) else ("", "", "")
        if opened and text.startswith("[") and rest.endswith(")") and "\n" not in data:
            found[text[1:]] = rest[:-1]
    return found


def _state(flow_run: "FlowRun") -> str:
    return flow_run.state_name or "unknown"


def _page(flow_run: "FlowRun") -> str:
    from prefect.utilities.urls import url_for

    return url_for("flow-run", flow_run.id) or str(flow_run.id)
