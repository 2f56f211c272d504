"""The work pool, the deployments and the automations on the server that PREFECT_API_URL names.

    python -m flows.services_setup WORKING_FOLDER

It may be run again at any time and changes what differs. Three things belong to the people who use the server and are
left as they are: schedules and work queues that exist, and whether an automation is enabled.
"""

import asyncio
import copy
import datetime
import importlib
import sys
from collections.abc import Sequence
from typing import Any
from uuid import UUID

from prefect import Flow
from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.actions import (
    DeploymentScheduleCreate,
    DeploymentScheduleUpdate,
    DeploymentUpdate,
    WorkPoolCreate,
    WorkPoolUpdate,
)
from prefect.client.schemas.filters import (
    DeploymentFilter,
    DeploymentFilterId,
    FlowRunFilter,
    FlowRunFilterExpectedStartTime,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import (
    ConcurrencyLimitStrategy,
    ConcurrencyOptions,
    DeploymentSchedule,
    FlowRun,
    StateType,
)
from prefect.client.schemas.schedules import construct_schedule
from prefect.client.schemas.sorting import FlowRunSort
from prefect.events.schemas.automations import AutomationCore
from prefect.exceptions import ObjectNotFound
from prefect.utilities.callables import parameter_schema
from prefect.utilities.processutils import command_to_string
from prefect.workers.process import ProcessWorker

from flows import deployments
from flows.deployments import POOL, Deployment


async def set_up(working_folder: str) -> None:
    """Make or bring up to date everything that `deployments/` describes."""
    async with get_client() as client:
        await _pool(client, working_folder)
        for queue, limit in deployments.queues().items():
            await _queue(client, queue, limit)
        for deployment in deployments.deployments():
            await _deployment(client, deployment)
            await _drop_missed(client, deployment)
        for document in deployments.automations():
            await _automation(client, AutomationCore.model_validate(document))


def job_template(working_folder: str) -> dict[str, Any]:
    """What a process worker does for a run: in this folder, by the Python that runs here.

    With a command of its own a run needs one process, and nothing is copied or installed for it.
    """
    template = copy.deepcopy(ProcessWorker.get_default_base_job_template())
    variables = template["variables"]["properties"]
    # -P: a file of that folder must not stand in for a module.
    variables["command"]["default"] = command_to_string([sys.executable, "-P", "-m", "prefect.engine"])
    variables["working_dir"]["default"] = working_folder
    return template


async def _pool(client: PrefectClient, working_folder: str) -> None:
    template = job_template(working_folder)
    try:
        await client.read_work_pool(POOL)
        await client.update_work_pool(POOL, WorkPoolUpdate(base_job_template=template))
    except ObjectNotFound:
        pool = WorkPoolCreate(
            name=POOL,
            type=ProcessWorker.type,
            base_job_template=template,
            description="Runs on this machine, made by `headrace up`.",
        )
        await client.create_work_pool(pool)


async def _queue(client: PrefectClient, name: str, limit: int) -> None:
    try:
        await client.read_work_queue_by_name(name, work_pool_name=POOL)
    except ObjectNotFound:
        await client.create_work_queue(name, concurrency_limit=limit, work_pool_name=POOL)


async def _deployment(client: PrefectClient, wanted: Deployment) -> None:
    flow = _flow(wanted.entrypoint)
    flow_id = await client.create_flow_from_name(flow.name)
    # Said once for both ways below: a field that only one of them had would differ after the second start.
    same: dict[str, Any] = {
        "description": wanted.description,
        "tags": list(wanted.tags),
        "entrypoint": wanted.entrypoint,
        "work_pool_name": POOL,
        "work_queue_name": wanted.queue,
        "job_variables": wanted.job_variables,
        "parameters": wanted.parameters,
        "parameter_openapi_schema": parameter_schema(flow).model_dump(),
        "enforce_parameter_schema": True,
        "concurrency_limit": wanted.limit,
    }
    if wanted.collision_strategy:
        same["concurrency_options"] = ConcurrencyOptions(
            collision_strategy=ConcurrencyLimitStrategy(wanted.collision_strategy)
        )
    try:
        found = await client.read_deployment_by_name(f"{flow.name}/{wanted.name}")
    except ObjectNotFound:
        schedules = [_schedule(item) for item in wanted.schedules]
        await client.create_deployment(flow_id=flow_id, name=wanted.name, schedules=schedules, **same)
        return
    both = _schedules(found.schedules, wanted)
    if both is not None:
        same["schedules"] = both
    await client.update_deployment(found.id, DeploymentUpdate(**same))


async def _drop_missed(client: PrefectClient, wanted: Deployment) -> None:
    """Of the runs that a schedule planned while nothing ran here, keep the last one: the others would all start now."""
    name = f"{_flow(wanted.entrypoint).name}/{wanted.name}"
    found = await client.read_deployment_by_name(name)
    while missed := missed_runs(await _overdue(client, found.id)):
        for flow_run in missed:
            await client.delete_flow_run(flow_run.id)


async def _overdue(client: PrefectClient, deployment_id: UUID) -> list[FlowRun]:
    """A page of the runs of a deployment that should have started already, the last one first."""
    return await client.read_flow_runs(
        deployment_filter=DeploymentFilter(id=DeploymentFilterId(any_=[deployment_id])),
        flow_run_filter=FlowRunFilter(
            state=FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.SCHEDULED])),
            expected_start_time=FlowRunFilterExpectedStartTime(before_=datetime.datetime.now(datetime.UTC)),
        ),
        sort=FlowRunSort.EXPECTED_START_TIME_DESC,
        limit=200,
    )


def missed_runs(overdue: Sequence[FlowRun]) -> list[FlowRun]:
    """Those that a schedule planned and that are not made up for: all but the first.

    Runs that somebody asked for stay.
    """
    planned = [flow_run for flow_run in overdue if flow_run.auto_scheduled and flow_run.run_count == 0]
    return planned[1:]


def _schedules(found: list[DeploymentSchedule], wanted: Deployment) -> list[DeploymentScheduleUpdate] | None:
    """Those that are there, as they are, and those that are missing; None when none is missing."""
    known = {item.slug for item in found}
    missing = [_schedule(item) for item in wanted.schedules if item["slug"] not in known]
    if not missing:
        return None
    both: list[DeploymentSchedule | DeploymentScheduleCreate] = [*found, *missing]
    return [
        DeploymentScheduleUpdate(schedule=item.schedule, active=item.active, slug=item.slug, parameters=item.parameters)
        for item in both
    ]


def _schedule(item: dict[str, Any]) -> DeploymentScheduleCreate:
    timing = {name: item[name] for name in ("cron", "interval", "timezone") if name in item}
    return DeploymentScheduleCreate(
        schedule=construct_schedule(**timing),
        active=item["active"],
        slug=item["slug"],
        parameters=item.get("parameters", {}),
    )


async def _automation(client: PrefectClient, wanted: AutomationCore) -> None:
    found = await client.read_automations_by_name(wanted.name)
    if not found:
        await client.create_automation(wanted)
        return
    first, *others = found
    await client.update_automation(first.id, wanted.model_copy(update={"enabled": first.enabled}))
    for other in others:
        await client.delete_automation(other.id)


def _flow(entrypoint: str) -> Flow[..., Any]:
    module, _, name = entrypoint.rpartition(".")
    flow: Flow[..., Any] = getattr(importlib.import_module(module), name)
    return flow


if __name__ == "__main__":
    asyncio.run(set_up(sys.argv[1]))
