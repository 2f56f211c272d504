"""MLflow brought up to date with the store: whatever a killed process or an absent server left out is written now.

One run is one MLflow run, the parent; each attempt is a run nested below it. The store has the events of all of them.
"""

from collections.abc import Iterator, Mapping

from headrace.errors import NotFound
from headrace.events import EventTail, read_events
from headrace.lease import hold_if_free
from headrace.mirror import GROUPS, Event, complete_attempt, complete_parent
from headrace.storage import Storage
from headrace.tracking import RunRecord, Status
from headrace.tracking_address import is_server, run_page, server_answers
from tasks.description import describe
from tasks.runs import (
    RUN_KEY_TAG,
    DatasetRef,
    Run,
    RunRequest,
    Workspace,
    artifact_root,
    flatten,
    lease_key,
    read_run,
)
from training.checkpoint.catalog import committed_on_chain
from training.launch.attempts import AttemptRecord, chain, read_attempts, rewound_to

ATTEMPT_TAG = "headrace.attempt"
DESCRIPTION_TAG = "mlflow.note.content"
"""What MLflow shows as the description of a run."""


def announce(space: Workspace, run: Run, request: RunRequest, dataset: DatasetRef) -> None:
    """Show on the parent what the run is: in words, its identity as parameters, and its dataset."""
    if DESCRIPTION_TAG not in space.tracker.get_run(run.run_id).tags:  # what people wrote instead stays
        space.tracker.set_tags(run.run_id, {DESCRIPTION_TAG: describe(run.spec, space.storage)})
    space.tracker.log_params(run.run_id, flatten(request.identity))
    source = space.storage.url(f"datasets/{dataset.key}/manifest.json")
    space.tracker.log_dataset(run.run_id, name=dataset.key, digest=dataset.digest, source=source)


def bring_up_to_date(space: Workspace, run: Run, *, running: int | None = None) -> None:
    """Close what earlier attempts left open, and give the parent every value that a commit covers.

    `running` is the attempt of this process, which is left alone.
    """
    nested = _nested(space, run)
    attempts = read_attempts(space.storage, run.spec.run_prefix)
    for record in attempts:
        known = nested.get(record.attempt)
        if record.attempt == running or (known is not None and known.status != "RUNNING"):
            continue
        child = known.run_id if known else open_attempt(space, run, record)
        events = _events_of(space, run, record.attempt)
        complete_attempt(space.tracker, child, events)
        space.tracker.set_status(child, _ending(events))
    complete_parent(
        space.tracker,
        run.run_id,
        covered_events(space.storage, run.spec.run_prefix),
        rewound_to=rewound_to(attempts),
    )


def reap(space: Workspace, experiment: str) -> None:
    """Runs of this store that are shown as RUNNING, while no command works on them, were killed: say so."""
    experiment_id = space.tracker.find_experiment(experiment)
    if experiment_id is None:
        return
    for record in space.tracker.find_runs(experiment_id, {}, status="RUNNING"):
        if record.artifact_root.startswith(f"{artifact_root(space.storage)}/"):
            reap_run(space, record)


def reap_run(space: Workspace, record: RunRecord) -> None:
    """The same for one run of this store; one that a command works on is left alone."""
    if RUN_KEY_TAG not in record.tags:
        return
    try:
        spec = read_run(space.storage, record.run_id)
    except NotFound:
        return  # another command has just made it and goes on with it
    # Held meanwhile: an attempt that a command starts just now must not be taken for one that was left open.
    with hold_if_free(space.storage, lease_key(record.run_id)) as free:
        if free and space.tracker.get_run(record.run_id).status == "RUNNING":
            bring_up_to_date(space, Run(spec, record.experiment_id, is_new=False))
            space.tracker.set_status(record.run_id, "KILLED")


def open_attempt(space: Workspace, run: Run, record: AttemptRecord) -> str:
    """Id of the nested run of an attempt, made when it is missing."""
    number = f"{record.attempt}"
    tags = {"mlflow.parentRunId": run.run_id, ATTEMPT_TAG: number}
    known = space.tracker.find_runs(run.experiment_id, tags)
    if known:
        return known[0].run_id
    restore = f"step {record.restore.step} of attempt {record.restore.attempt}" if record.restore else "initial weights"
    facts = {
        "headrace.restored_from": restore,
        "headrace.host": record.host,
        "headrace.code_digest": record.code_digest,
        **{f"headrace.layout.{key}": str(value) for key, value in record.layout.items()},
        **{f"headrace.version.{key}": value for key, value in record.versions.items()},
    }
    name = f"{run.spec.name} attempt {number}"
    tags = {ATTEMPT_TAG: number, **facts}
    return space.tracker.create_run(run.experiment_id, name, tags=tags, parent_id=run.run_id).run_id


def covered_events(storage: Storage, run_prefix: str) -> Iterator[Event]:
    """The metric events that count, oldest first: of each attempt the part that a commit on the chain covers."""
    newest = next(committed_on_chain(storage, run_prefix), None)
    if newest is None:
        return
    for link in reversed(chain(read_attempts(storage, run_prefix))):
        for event in read_events(storage, run_prefix, link.attempt):
            if event["kind"] in GROUPS and link.covers(event["step"]) and event["step"] <= newest[0]:
                yield event


def evaluation_in_training(storage: Storage, run_prefix: str, step: int) -> Event | None:
    """What the loop measured after `step`, on the chain; None when nothing was measured then."""
    for link in chain(read_attempts(storage, run_prefix)):
        if link.covers(step):
            events = read_events(storage, run_prefix, link.attempt)
            return next((e for e in events if e["kind"] == "evaluation" and e["step"] == step), None)
    return None


def untrained_bits_per_byte(storage: Storage, run_prefix: str) -> float | None:
    """What the loop measured before the first step; None when nothing was measured then."""
    for event in covered_events(storage, run_prefix):
        if event["kind"] == "evaluation" and event["step"] == 0:
            return float(event["bits_per_byte"])
    return None


def live_page(space: Workspace, run: Run) -> str | None:
    """The run's page on a server that answers, or None."""
    uri = space.tracker.uri
    return run_page(uri, run.experiment_id, run.run_id) if is_server(uri) and server_answers(uri) else None


def _nested(space: Workspace, run: Run) -> Mapping[int, RunRecord]:
    children = space.tracker.children(run.experiment_id, run.run_id)
    return {int(child.tags[ATTEMPT_TAG]): child for child in reversed(children) if ATTEMPT_TAG in child.tags}


def _events_of(space: Workspace, run: Run, attempt: int) -> list[Event]:
    """All that is known of an ended attempt: its local file, when this machine has it, goes beyond the last commit."""
    published = read_events(space.storage, run.spec.run_prefix, attempt)
    local = EventTail(space.attempt_dir(run.run_id, attempt) / "events.jsonl").new()
    return [event for _, event in sorted({event["seq"]: event for event in [*local, *published]}.items())]


def _ending(events: list[Event]) -> Status:
    return "FINISHED" if any(event["kind"] == "finished" for event in events) else "KILLED"
