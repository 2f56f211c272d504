"""The reconciler: what Prefect believes of pretraining runs is made true, and what died is continued.

    crashed, or called Running while its process is gone     another flow run continues it, within a budget
    called Cancelling while its process is gone              Cancelled, which is final
    shown as RUNNING in MLflow while nobody works on it      KILLED there

Scheduled every half minute. Two of them at once do what one does: see `flows/reconcile.py`, which decides.
"""

import contextlib
import datetime
from collections.abc import Iterator
from dataclasses import dataclass

from prefect import flow, get_run_logger
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import (
    FlowFilter,
    FlowFilterName,
    FlowRunFilter,
    FlowRunFilterDeploymentId,
    FlowRunFilterEndTime,
    FlowRunFilterIdempotencyKey,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.client.schemas.sorting import FlowRunSort
from prefect.exceptions import ObjectNotFound
from prefect.states import Cancelled, Crashed, Failed

from flows.config import PipelineConfig, store_root
from flows.presence import abandoned_runs, presences, run_of
from flows.reconcile import (
    BUDGET,
    Decision,
    Presence,
    Seen,
    counts_of,
    decide,
    successor_key,
    successor_name,
    successor_tags,
)
from headrace.config_check import parse
from headrace.environment import home, work_path
from headrace.errors import ConfigError, HeadraceError, NotFound
from headrace.storage import Storage
from headrace.tracking import Tracker
from tasks.runs import Workspace
from tasks.shown import reap_run
from training.checkpoint.catalog import list_commits

FLOWS = ["pretrain", "prepare-data", "train-model", "evaluate-model", "register-model"]
"""Those that work on a run, with a config as their one parameter."""

LOOK_BACK_DAYS = 7
"""What crashed longer ago is left: nobody waits for it any more."""

PAGE = 200
"""Flow runs in one answer of the API."""

LIVE_STATES = [StateType.RUNNING, StateType.PENDING, StateType.CANCELLING, StateType.SCHEDULED]
OF_DEPLOYMENTS = FlowRunFilterDeploymentId(is_null_=False)


@dataclass(frozen=True)
class Suspect:
    """A flow run, and the store on which its process shows itself."""

    flow_run: FlowRun
    root: str
    storage: Storage

    @property
    def id(self) -> str:
        """Id of the flow run."""
        return str(self.flow_run.id)


@flow(name="reconcile", persist_result=False, timeout_seconds=300)
def reconcile(budget: int = BUDGET, watch_seconds: float = 20.0, flow_names: list[str] = FLOWS) -> list[str]:
    """Continue what died, end what was cancelled, and correct what MLflow shows. Returns what was done, in words."""
    with get_client(sync_client=True) as client:
        suspects = find_suspects(client, flow_names)
        present = presences({suspect.id: suspect.storage for suspect in suspects}, watch_seconds)
        done = [said for suspect in suspects if (said := settle(client, suspect, present[suspect.id], budget))]
    for said in done:
        get_run_logger().info("%s", said)
    default = str(home() / "store")
    _reap({default: Storage.open(default), **{suspect.root: suspect.storage for suspect in suspects}})
    return done


def find_suspects(client: SyncPrefectClient, flow_names: list[str]) -> list[Suspect]:
    """Every flow run that may have died: of a deployment, and not ended by itself."""
    since = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=LOOK_BACK_DAYS)
    crashed = FlowRunFilter(
        deployment_id=OF_DEPLOYMENTS,
        state=FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.CRASHED])),
        end_time=FlowRunFilterEndTime(after_=since),
    )
    # However long ago it started: a training may take weeks.
    live = FlowRunFilter(
        deployment_id=OF_DEPLOYMENTS, state=FlowRunFilterState(type=FlowRunFilterStateType(any_=LIVE_STATES))
    )
    stores: dict[str, Storage] = {}
    found = (_suspect(flow_run, stores) for wanted in (live, crashed) for flow_run in _all(client, flow_names, wanted))
    return [suspect for suspect in found if suspect is not None]


def _all(client: SyncPrefectClient, flow_names: list[str], wanted: FlowRunFilter) -> Iterator[FlowRun]:
    of_flows = FlowFilter(name=FlowFilterName(any_=flow_names))
    offset = 0
    while True:
        page = client.read_flow_runs(
            flow_filter=of_flows,
            flow_run_filter=wanted,
            sort=FlowRunSort.EXPECTED_START_TIME_DESC,
            limit=PAGE,
            offset=offset,
        )
        yield from (flow_run for flow_run in page if not _only_queued(flow_run))
        if len(page) < PAGE:
            return
        offset += PAGE


def _only_queued(flow_run: FlowRun) -> bool:
    return flow_run.state_type == StateType.SCHEDULED and flow_run.state_name != "AwaitingRetry"


def _suspect(flow_run: FlowRun, stores: dict[str, Storage]) -> Suspect | None:
    try:
        config = parse(PipelineConfig, flow_run.parameters.get("config") or {})
        root = store_root(config, home())
        stores[root] = stores.get(root) or Storage.open(root)
        return Suspect(flow_run, root, stores[root])
    except HeadraceError as error:
        get_run_logger().warning("The flow run %s is left alone: %s", flow_run.name, str(error).splitlines()[0])
        return None


def settle(client: SyncPrefectClient, suspect: Suspect, presence: Presence, budget: int) -> str | None:
    """Decide about one flow run by its newest state, and do it; what was done in words, or None.

    A state is never forced: a flow run that ends by itself at this moment keeps its own end.
    """
    try:
        flow_run = client.read_flow_run(suspect.flow_run.id)
        step = max(committed_step(suspect), counts_of(flow_run.tags)[1])
        decision = decide(see(client, flow_run, presence, step), budget)
        return _do(client, flow_run, decision, step)
    except ObjectNotFound:
        return f"{suspect.flow_run.name}: its deployment was deleted, so nothing can continue it."
    except HeadraceError as error:
        return f"{suspect.flow_run.name}: left for the next time: {error}"


def see(client: SyncPrefectClient, flow_run: FlowRun, presence: Presence, step: int) -> Seen:
    """The record to decide on."""
    now = datetime.datetime.now(datetime.UTC)
    state = flow_run.state
    if state is None:
        return Seen(state="NONE", presence=presence, seconds_in_state=0.0)
    planned = state.state_details.scheduled_time
    fruitless, step_before = counts_of(flow_run.tags)
    return Seen(
        state=state.type.value,
        presence=presence,
        seconds_in_state=(now - state.timestamp).total_seconds(),
        awaits_retry=state.name == "AwaitingRetry",
        seconds_late=(now - planned).total_seconds() if planned else 0.0,
        cancel_asked=state.is_crashed() and _was_cancelling(client, flow_run),
        continued=_successor(client, flow_run) is not None,
        step=step,
        step_before=step_before,
        fruitless=fruitless,
        message=" ".join((state.message or "").split())[:300],
    )


def committed_step(suspect: Suspect) -> int:
    """Newest committed step of the run that a flow run works on; 0 when there is none."""
    run_id = run_of(suspect.storage, suspect.id)
    commits = list_commits(suspect.storage, f"runs/{run_id}/artifacts") if run_id else []
    return commits[0].step if commits else 0


def _was_cancelling(client: SyncPrefectClient, flow_run: FlowRun) -> bool:
    return any(state.is_cancelling() for state in client.read_flow_run_states(flow_run.id))


def _successor(client: SyncPrefectClient, flow_run: FlowRun) -> FlowRun | None:
    key = FlowRunFilterIdempotencyKey(any_=[successor_key(str(flow_run.id))])
    found = client.read_flow_runs(flow_run_filter=FlowRunFilter(idempotency_key=key))
    return found[0] if found else None


def _do(client: SyncPrefectClient, flow_run: FlowRun, decision: Decision, step: int) -> str | None:
    if decision.action == "leave":
        return None
    if decision.action == "cancel":
        client.set_flow_run_state(flow_run.id, Cancelled(message=decision.why))
        return f"{flow_run.name}: Cancelled. {decision.why}"
    if decision.action == "fail":
        client.set_flow_run_state(flow_run.id, Failed(message=decision.why))
        return f"{flow_run.name}: Failed. {decision.why}"
    successor = _continue(client, flow_run, decision, step)
    said = f"{decision.why} {successor.name} continues it from step {step}."
    if decision.mark_crashed:
        client.set_flow_run_state(flow_run.id, Crashed(message=said))
    return f"{flow_run.name}: {said}"


def _continue(client: SyncPrefectClient, flow_run: FlowRun, decision: Decision, step: int) -> FlowRun:
    if flow_run.deployment_id is None:
        raise ConfigError(f"The flow run {flow_run.name} belongs to no deployment; nothing can continue it.")
    return client.create_flow_run_from_deployment(
        flow_run.deployment_id,
        parameters=flow_run.parameters,
        name=successor_name(flow_run.name),
        tags=successor_tags(flow_run.tags, decision, step),
        idempotency_key=successor_key(str(flow_run.id)),
        work_queue_name=flow_run.work_queue_name,
        job_variables=flow_run.job_variables,
    )


def _reap(stores: dict[str, Storage]) -> None:
    """Correct what MLflow shows of runs whose command was killed here; without one MLflow is not even loaded."""
    abandoned = {root: found for root, storage in stores.items() if (found := abandoned_runs(storage))}
    if not abandoned:
        return
    try:
        tracker = Tracker.connect()
        for root, run_ids in abandoned.items():
            for run_id in run_ids:
                with contextlib.suppress(NotFound):  # of another MLflow
                    reap_run(Workspace(stores[root], tracker, work_path()), tracker.get_run(run_id))
    except HeadraceError as error:
        get_run_logger().warning("MLflow is corrected the next time: %s", error)
