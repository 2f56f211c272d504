"""What there is: runs as the store and MLflow know them, and the folder of a model by any of its names.

MLflow says which runs exist, where their files lie, and how they ended; the store says how far they came.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.environment import work_path
from headrace.errors import DamagedData, HeadraceError, InputError, NotFound
from headrace.events import read_events
from headrace.registry import Registry, VersionRecord
from headrace.storage import Storage
from headrace.tracking import RunRecord, Tracker
from headrace.tracking_address import default_uri, is_server, run_page, server_answers
from tasks.exports import exports_of, key_below
from tasks.runs import RUN_KEY_TAG, SCORE_TAG, VERSION_TAG, is_held, read_run
from training.checkpoint.catalog import list_commits
from training.health.doctor import Finding, examine
from training.health.goodput import Goodput, account
from training.launch.attempts import read_attempts
from training.launch.resume import committed_by

RUN_ID = re.compile(r"[0-9a-f]{32}")
MODEL_URI = re.compile(r"models:/(?P<name>[^/@]+)(?:@(?P<alias>[^/@]+)|/(?P<version>\d+))")


@dataclass(frozen=True)
class RunPlace:
    """Where a run lies."""

    run_id: str
    name: str
    storage: Storage
    prefix: str
    """Storage key of its artifact root."""


@dataclass(frozen=True)
class RunLine:
    """One run in one line."""

    run_id: str
    name: str
    status: str
    step: int
    steps: int
    attempts: int
    dataset: str
    bits_per_byte: float | None
    model: str | None
    """Registered version, as name/version."""
    problem: str | None = None
    """Why the rest is not known; the status is DAMAGED then."""


def connect() -> Tracker | None:
    """The tracking store; None when there is none yet, and none is made for a look."""
    if default_uri().startswith("sqlite:///") and not Path(default_uri().removeprefix("sqlite:///")).exists():
        return None
    return Tracker.connect()


def list_runs() -> list[RunLine]:
    """Every run, newest first."""
    tracker = connect()
    return [_line_or_problem(record) for record in reversed(_records(tracker))] if tracker else []


def show_run(name: str) -> dict[str, Any]:
    """Everything about one run: by its id, the beginning of it, or its name (then the newest)."""
    tracker, record = find_run(name)
    line = _line(record)
    storage, prefix = _place(record)
    spec = read_run(storage, record.run_id)
    page = run_page(tracker.uri, record.experiment_id, record.run_id)
    return {
        **vars(line),
        "run_key": spec.run_key,
        "store": storage.root_url,
        "place": storage.url(prefix),
        "checkpoints": [{"step": c.step, "attempt": c.attempt} for c in list_commits(storage, prefix)],
        "attempt_log": [
            {
                "attempt": attempt.attempt,
                "restored_from": attempt.restore.step if attempt.restore else None,
                "host": attempt.host,
                "layout": attempt.layout,
            }
            for attempt in read_attempts(storage, prefix)
        ],
        "exports": [storage.url(folder) for folder, _ in exports_of(storage, prefix)],
        "config": spec.model_dump(mode="json"),
        "page": page if is_server(tracker.uri) and server_answers(tracker.uri) else None,
    }


def run_account(name: str) -> tuple[RunRecord, Goodput]:
    """Where the time of a run went."""
    _, record = find_run(name)
    storage, prefix = _place(record)
    attempts = read_attempts(storage, prefix)
    return record, account(attempts, {a.attempt: read_events(storage, prefix, a.attempt) for a in attempts})


def examine_run(name: str) -> tuple[RunRecord, list[Finding]]:
    """What is wrong with a run, the gravest first."""
    _, record = find_run(name)
    storage, prefix = _place(record)
    try:
        read_run(storage, record.run_id)
    except DamagedData as error:
        return record, [Finding("damaged document", (str(error),), "")]
    except NotFound:
        return record, [Finding("never started", (), "Give the command again; it was killed before it began.")]
    attempts = read_attempts(storage, prefix)
    findings = examine(
        attempts,
        {a.attempt: read_events(storage, prefix, a.attempt) for a in attempts},
        committed=committed_by(storage, prefix),
        is_worked_on=is_held(storage, record.run_id),
    )
    return record, findings


def find_run(name: str) -> tuple[Tracker, RunRecord]:
    """A run by its id, the beginning of it, or its name. Raises InputError, saying what there is."""
    tracker = connect()
    records = _records(tracker) if tracker else []
    by_id = [record for record in records if record.run_id.startswith(name)] if len(name) >= 4 else []
    by_name = [record for record in records if record.name == name]
    found = by_id[-1:] if len(by_id) == 1 else by_name[-1:]
    if tracker is None or not found:
        names = ", ".join(sorted({record.name for record in records})) or "none"
        raise InputError(f"There is no run {name!r}. Runs by name: {names}; `headrace runs ls` lists them.")
    return tracker, found[0]


def find_place(name: str) -> RunPlace:
    """Where the run lies that `find_run` finds; raises InputError."""
    return _named_place(find_run(name)[1])


def every_place() -> list[RunPlace]:
    """Where each run lies, oldest first."""
    tracker = connect()
    return [_named_place(record) for record in _records(tracker)] if tracker else []


def model_folder(model: str) -> Path:
    """A local folder with the model: from a folder, `models:/NAME@ALIAS`, a run's id, or a registered name.

    A registered name alone means its champion. Files of a remote store are copied once. Raises InputError.
    """
    if Path(model).is_dir():
        return Path(model)
    match = MODEL_URI.fullmatch(model)
    if match:
        return _version_folder(match["name"], alias=match["alias"], version=match["version"])
    if "/" in model or ":" in model:
        raise InputError(
            f"{model!r} is neither a folder nor a model. Give a folder, models:/NAME@champion, models:/NAME/VERSION, "
            "the id of a run, or the name of a registered model."
        )
    if RUN_ID.fullmatch(model):
        _, record = find_run(model)
        storage, prefix = _place(record)
        exports = exports_of(storage, prefix)
        if not exports:
            raise InputError(f"The run {model} has no exported model yet; `headrace run` with its config makes one.")
        return _local(storage, exports[-1][0])
    return _version_folder(model, alias="champion", version=None)


def _version_folder(name: str, *, alias: str | None, version: str | None) -> Path:
    tracker = connect()
    if tracker is None:
        raise InputError(f"There is no registered model {name!r} yet; `headrace run` makes one.")
    registry = Registry(tracker)
    found: VersionRecord | None
    if alias is not None:
        found = registry.version_by_alias(name, alias)
    else:
        found = next((v for v in registry.versions(name) if v.version == version), None)
    if found is None:
        versions = ", ".join(v.version for v in registry.versions(name))
        if not versions:
            known = ", ".join(registry.names()) or "none; `headrace run` makes one"
            raise InputError(f"There is no registered model {name!r}; there are: {known}.")
        missing = f"alias {alias!r}" if alias is not None else f"version {version}"
        raise InputError(f"The registered model {name!r} has no {missing}; its versions: {versions}.")
    model_id = found.tags.get("headrace.model_id")
    if model_id is None:
        raise InputError(
            f"Version {found.version} of {name!r} was not registered by headrace; give its folder instead."
        )
    location = registry.get_model(model_id).location
    root, separator, _ = location.rpartition("/runs/models/")
    if not separator:
        raise HeadraceError(f"The model lies at {location}, which is no place of a headrace store.")
    storage = Storage.open(root)
    return _local(storage, key_below(storage, location))


def _local(storage: Storage, prefix: str) -> Path:
    """The folder on this machine, copied from a remote store file by file when it is not there yet."""
    local = storage.local_path(prefix)
    if local is not None:
        return local
    target = work_path() / "models" / prefix.replace("/", "_")
    for key in storage.list(prefix):
        path = target / key.removeprefix(f"{prefix}/")
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            storage.get_file(key, path)
    return target


def _records(tracker: Tracker) -> list[RunRecord]:
    records = [run for experiment in tracker.experiments() for run in tracker.find_runs(experiment, {})]
    return [record for record in records if RUN_KEY_TAG in record.tags and not record.deleted]


def _place(record: RunRecord) -> tuple[Storage, str]:
    """The store of a run, and its prefix there."""
    root, separator, below = record.artifact_root.rpartition(f"/runs/{record.run_id}/")
    if not separator:
        raise HeadraceError(f"The run {record.run_id} keeps its files at {record.artifact_root}: no headrace store.")
    return Storage.open(root), f"runs/{record.run_id}/{below}"


def _named_place(record: RunRecord) -> RunPlace:
    return RunPlace(record.run_id, record.name, *_place(record))


def _line_or_problem(record: RunRecord) -> RunLine:
    """One damaged run does not hide the others."""
    try:
        return _line(record)
    except DamagedData as error:
        return RunLine(record.run_id, record.name, "DAMAGED", 0, 0, 0, "", None, None, problem=str(error))


def _line(record: RunRecord) -> RunLine:
    storage, prefix = _place(record)
    try:
        spec = read_run(storage, record.run_id)
    except NotFound:
        spec = None  # killed before its document was written
    commits = list_commits(storage, prefix)
    score = record.tags.get(SCORE_TAG)
    interrupted = record.status == "RUNNING" and not is_held(storage, record.run_id)
    return RunLine(
        run_id=record.run_id,
        name=record.name,
        status="INTERRUPTED" if interrupted else record.status,
        step=commits[0].step if commits else 0,
        steps=spec.training.steps if spec else 0,
        attempts=len(read_attempts(storage, prefix)),
        dataset=spec.dataset_key if spec else "",
        bits_per_byte=float(score) if score else None,
        model=record.tags.get(VERSION_TAG),
    )
