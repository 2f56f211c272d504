"""What a flow run of a deployment leaves on the store, so that others can tell whether its process still works.

    leases/flow-<flow run id>       rewritten every five seconds while the process lives
    flow-runs/<flow run id>.json    which run it works on, written once

Prefect's own state is a guess: a run that is called Running may be dead, and one that is called Crashed may live. A
command on a terminal (`headrace run`) leaves nothing: nobody but its user starts it again.
"""

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from prefect.runtime import deployment, flow_run

from flows.reconcile import Presence
from headrace.errors import NotFound
from headrace.lease import LeaseHolder, hold, read_holder
from headrace.storage import Storage, json_document
from tasks.runs import lease_key

logger = logging.getLogger(__name__)

PRESENCE_TTL = 20.0
"""Seconds; a process that did not rewrite its lease for so long is silent. It rewrites it four times as often."""


def presence_key(flow_run_id: str) -> str:
    """The lease that the process of a flow run holds."""
    return f"leases/flow-{flow_run_id}"


@contextmanager
def present(storage: Storage) -> Iterator[None]:
    """Within the block the store says that this flow run's process lives, when a deployment started it."""
    run_id = _flow_run_of_deployment()
    if run_id is None:
        yield
        return
    with hold(storage, presence_key(run_id), ttl=PRESENCE_TTL):
        yield


def works_on(storage: Storage, run_id: str) -> None:
    """Note which run this flow run works on: its commits say whether another try is worth it."""
    flow_run_id = _flow_run_of_deployment()
    if flow_run_id is not None:
        storage.create(_note(flow_run_id), json_document({"run_id": run_id}))


def run_of(storage: Storage, flow_run_id: str) -> str | None:
    """The run that a flow run works on; None when it did not come so far."""
    try:
        return str(storage.read_json(_note(flow_run_id))["run_id"])
    except NotFound:
        return None


def presences(stores: Mapping[str, Storage], seconds: float) -> dict[str, Presence]:
    """Whether the processes of flow runs live, by flow run id; watches the beat of those on other machines.

    Returns as soon as nothing is left to find out, after `seconds` at the latest: what has not beaten by then is
    silent.
    """
    first = {run_id: read_holder(storage, presence_key(run_id)) for run_id, storage in stores.items()}
    known = {run_id: found for run_id, holder in first.items() if (found := _at_once(holder)) is not None}
    deadline = time.monotonic() + seconds
    while len(known) < len(stores) and time.monotonic() < deadline:
        time.sleep(min(1.0, seconds / 10))
        for run_id in stores.keys() - known.keys():
            holder = read_holder(stores[run_id], presence_key(run_id))
            if holder != first[run_id]:
                known[run_id] = "alive" if holder is not None else "absent"
    return {run_id: known.get(run_id, "silent") for run_id in stores}


def abandoned_runs(storage: Storage) -> list[str]:
    """Ids of the runs whose command was killed on this machine: it could not give back its lease."""
    prefix = lease_key("")
    leases = [key for key in storage.list("leases") if key.startswith(prefix)]
    holders = {key.removeprefix(prefix): read_holder(storage, key) for key in leases}
    return [run_id for run_id, holder in holders.items() if holder is not None and holder.gone]


def _at_once(holder: LeaseHolder | None) -> Presence | None:
    """What one look says; None when only time can tell."""
    if holder is None:
        return "absent"
    if holder.gone:
        return "gone"
    return "alive" if holder.here else None


def _note(flow_run_id: str) -> str:
    return f"flow-runs/{flow_run_id}.json"


def _flow_run_of_deployment() -> str | None:
    run_id = flow_run.get_id()
    return str(run_id) if run_id and deployment.get_id() else None
