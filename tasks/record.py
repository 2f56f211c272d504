"""The record of a run in MLflow as steps of the flow: opened before training, completed after it.

Thin, so that an MLflow that is away for a minute is asked again by the policy of all stages.
"""

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.policy import RETRY_DELAYS, SHORT_RETRIES, worth_another_try
from tasks.runs import DatasetRef, Run, RunRequest, Workspace, resolve_run
from tasks.shown import announce, bring_up_to_date


@task(
    name="open run",
    retries=SHORT_RETRIES,
    retry_delay_seconds=RETRY_DELAYS,
    retry_condition_fn=worth_another_try,
    cache_policy=NO_CACHE,
    persist_result=False,
)
def open_run(space: Workspace, request: RunRequest, dataset: DatasetRef) -> Run:
    """Find or make the run that this identity names, and show what it is."""
    run = resolve_run(space, request, dataset)
    announce(space, run, request, dataset)
    return run


@task(
    name="complete run",
    retries=SHORT_RETRIES,
    retry_delay_seconds=RETRY_DELAYS,
    retry_condition_fn=worth_another_try,
    cache_policy=NO_CACHE,
    persist_result=False,
)
def complete_run(space: Workspace, run: Run) -> None:
    """Write whatever MLflow missed while it was away."""
    bring_up_to_date(space, run)
