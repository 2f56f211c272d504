"""`headrace status` and `headrace down`: what `headrace up` of this state folder runs, and its end."""

import contextlib
import os
import signal
import time
from typing import Any

from flows.services_api import NoAnswer, answers, ask
from flows.services_file import ServiceRecord, ServicesRecord, holder, read_record, remove_record
from flows.services_marks import kill, mark_of, marked
from headrace.environment import home
from headrace.errors import HeadraceError
from headrace.process import machine_id, pid_alive
from headrace.tracking_address import server_answers

STOP_SECONDS = 35.0
"""`up` ends within thirty seconds when it is asked to."""

SWEEP_SECONDS = 15.0
RUNNING = ("RUNNING", "PENDING", "CANCELLING", "PAUSED")
ONLINE_SECONDS = 90.0
"""A worker says every thirty seconds that it is there."""


def status() -> dict[str, Any]:
    """What runs, what answers, and what is scheduled; `live` says whether everything does."""
    record, starting = read_record(), holder()
    if record is None or not record.alive:
        return {"home": str(home()), "live": False, "starting": starting is not None, "up": None, "services": []}
    services = [_service(record, service) for service in record.services]
    runs, deployments = _runs(record), _deployments(record)
    return {
        "home": str(home()),
        "live": all(service["alive"] and service["answers"] for service in services),
        "starting": False,
        "up": {"pid": record.pid, "since": record.since},
        "services": services,
        "prefect_api": record.prefect_api,
        "pages": {"Prefect": record.prefect_ui, "MLflow": record.mlflow_page},
        "deployments": deployments,
        "runs": runs,
    }


def _service(record: ServicesRecord, service: ServiceRecord) -> dict[str, Any]:
    return {
        "name": service.name,
        "pid": service.pid,
        "alive": service.alive,
        "answers": service.alive and _answers(record, service),
        "url": service.url,
        "since": service.since,
        "log": service.log,
    }


def _answers(record: ServicesRecord, service: ServiceRecord) -> bool:
    if service.name == "prefect":
        return answers(f"{record.prefect_api}/health")
    if service.name == "mlflow":
        return server_answers(record.mlflow)
    workers = _ask(record, "work_pools/headrace/workers/filter", {}) or []
    return any(worker["status"] == "ONLINE" for worker in workers)


def _deployments(record: ServicesRecord) -> list[dict[str, Any]]:
    """Every deployment by name, with the time of its next scheduled run when there is one."""
    found = _ask(record, "deployments/filter", {"sort": "NAME_ASC", "limit": 200}) or []
    flows = _names(record, "flows", [deployment["flow_id"] for deployment in found])
    planned = _ask(
        record,
        "flow_runs/filter",
        {
            "sort": "NEXT_SCHEDULED_START_TIME_ASC",
            "flow_runs": {"state": {"type": {"any_": ["SCHEDULED"]}}},
            "limit": 200,
        },
    )
    following: dict[str, str] = {}
    for run in planned or []:
        following.setdefault(run["deployment_id"], run["next_scheduled_start_time"])
    return [
        {
            "name": f"{flows.get(deployment['flow_id'], '?')}/{deployment['name']}",
            "next": following.get(deployment["id"]),
        }
        for deployment in found
    ]


def _runs(record: ServicesRecord) -> list[dict[str, Any]]:
    """Flow runs that are not over, newest first."""
    found = _ask(
        record,
        "flow_runs/filter",
        {"sort": "START_TIME_DESC", "flow_runs": {"state": {"type": {"any_": list(RUNNING)}}}, "limit": 200},
    )
    flows = _names(record, "flows", [run["flow_id"] for run in found or []])
    return [
        {
            "name": run["name"],
            "flow": flows.get(run["flow_id"], "?"),
            "state": run["state_name"],
            "since": run["start_time"],
            "page": f"{record.prefect_ui}/runs/flow-run/{run['id']}",
        }
        for run in found or []
    ]


def _names(record: ServicesRecord, kind: str, ids: list[str]) -> dict[str, str]:
    found = _ask(record, f"{kind}/filter", {kind: {"id": {"any_": sorted(set(ids))}}, "limit": 200}) if ids else []
    return {item["id"]: item["name"] for item in found or []}


def _ask(record: ServicesRecord, path: str, body: dict[str, Any]) -> list[dict[str, Any]] | None:
    try:
        found: list[dict[str, Any]] = ask(f"{record.prefect_api}/{path}", body)
    except NoAnswer:
        return None  # that the server does not answer is said once, beside the server
    return found


def down() -> dict[str, Any]:
    """End the `up` of this state folder and all that it started, and nothing else; waits for the end.

    Raises HeadraceError when something does not end.
    """
    record = read_record()
    running = holder()
    ended: list[dict[str, Any]] = []
    if record is not None and record.machine == machine_id():
        ours = marked(mark_of(record.pid, record.start_time))
        alive = [service for service in record.services if service.alive and service.pid in ours]
        ended = [{"name": service.name, "pid": service.pid} for service in alive]
    if running is not None:
        ended.append({"name": "up", "pid": running[0]})
        _end_up(*running)
    elif record is not None:
        _end_rest(record)
    return {"home": str(home()), "ended": ended}


def _end_up(pid: int, started: int) -> None:
    _signal(pid, started, signal.SIGTERM)
    if not _gone(pid, started, STOP_SECONDS):
        _signal(pid, started, signal.SIGKILL)
    mark = mark_of(pid, started)
    deadline = time.monotonic() + SWEEP_SECONDS
    while (pid_alive(pid, started) or marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    if pid_alive(pid, started) or not kill(mark):
        raise HeadraceError(f"Processes of `headrace up` (process {pid}) did not end: {marked(mark)}.")
    remove_record(pid, started)


def _end_rest(record: ServicesRecord) -> None:
    """End what an `up` left that is gone itself; usually its sweeper has done that."""
    if record.machine != machine_id():
        raise HeadraceError(
            f"`headrace up` of {home()} was started on another machine ({record.machine.split('/')[0]}); end it there."
        )
    if not kill(mark_of(record.pid, record.start_time)):
        raise HeadraceError(f"Processes of `headrace up` (process {record.pid}) did not end.")
    remove_record(record.pid, record.start_time)


def _signal(pid: int, started: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, OSError):
        handle = os.pidfd_open(pid)
        try:
            if pid_alive(pid, started):
                signal.pidfd_send_signal(handle, number)
        finally:
            os.close(handle)


def _gone(pid: int, started: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while pid_alive(pid, started):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True
