"""From a config and a dataset to the run it names: the same identity is the same run, on the store and in MLflow.

The MLflow run is made first, because MLflow chooses its id; `run-keys/<run key>.json`, create-only, then decides which
run the key names. A run that was made and not named (a killed process, or two at once) is taken over or removed.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from headrace.digest import digest_json
from headrace.environment import code_digest
from headrace.errors import ConfigError, DamagedData, NotFound
from headrace.lease import LeaseHolder
from headrace.storage import Storage, json_document
from headrace.tracking import RunRecord, Tracker
from headrace.tracking_address import redact
from training.checkpoint.config import CheckpointConfig
from training.config import TrainingConfig
from training.evaluation.config import EvaluationConfig
from training.health.config import StabilityConfig
from training.launch.config import LaunchConfig
from training.model.config import ModelConfig
from training.optim.config import OptimizerConfig, ScheduleConfig
from training.parallel.config import LayoutConfig
from training.run_spec import RunSpec

RUN_KEY_TAG = "headrace.run_key"
NAME_TAG = "headrace.name"
SCORE_TAG = "headrace.bits_per_byte"
VERSION_TAG = "headrace.version"

MADE_AGAIN = "Move it away and give the run's command again: it is written anew, and the run goes on."


@dataclass(frozen=True)
class Workspace:
    """Where a pipeline works: the store, the tracking store, and the local folder for scratch."""

    storage: Storage
    tracker: Tracker
    work_dir: Path

    def attempt_dir(self, run_id: str, attempt: int) -> Path:
        """Scratch of one attempt."""
        return self.work_dir / run_id / f"attempt-{attempt:04d}"


@dataclass(frozen=True)
class DatasetRef:
    """The dataset that a run is trained and evaluated on."""

    key: str
    digest: str
    tokenizer_digest: str


@dataclass(frozen=True)
class RunRequest:
    """What a config asks for; `identity` holds all its identity fields as plain JSON values."""

    name: str
    seed: int
    experiment: str
    identity: Mapping[str, Any]
    model: ModelConfig
    training: TrainingConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    evaluation: EvaluationConfig
    checkpoint: CheckpointConfig
    layout: LayoutConfig
    launch: LaunchConfig
    stability: StabilityConfig

    def run_key(self, dataset: DatasetRef) -> str:
        """Digest of everything that decides what is learned."""
        return digest_json(
            {
                "identity": self.identity,
                "dataset_digest": dataset.digest,
                "tokenizer_digest": dataset.tokenizer_digest,
            }
        )


@dataclass(frozen=True)
class Run:
    """A run of this command: its document with this command's execution fields, and its place in MLflow."""

    spec: RunSpec
    experiment_id: str
    is_new: bool
    related: str | None = None
    """What a user should know about another run of the same name."""

    @property
    def run_id(self) -> str:
        """The MLflow run id, and the run's name on the store."""
        return self.spec.run_id


def resolve_run(space: Workspace, request: RunRequest, dataset: DatasetRef) -> Run:
    """The run that this identity names, made when there is none.

    Raises ConfigError when MLflow does not know the named run, or when its experiment keeps files elsewhere.
    """
    key = request.run_key(dataset)
    named = _named_run(space, key)
    is_new = named is None
    record = named or _make_run(space, request, dataset, key)
    spec = _document(space.storage, record.run_id, key, request, dataset)
    related = _related_run(space, request, record) if is_new else _moved_experiment(space, request, record)
    return Run(spec, record.experiment_id, is_new, related)


def lease_key(run_id: str) -> str:
    """The lease of the command that works on a run."""
    return f"leases/run-{run_id}"


def is_held(storage: Storage, run_id: str) -> bool:
    """Whether a command works on the run; one on another machine counts until somebody takes over its lease."""
    try:
        return not LeaseHolder(**storage.read_json(lease_key(run_id))).gone
    except NotFound:
        return False
    except (TypeError, DamagedData):
        return True  # of another version


def artifact_root(storage: Storage) -> str:
    """The artifact root of experiments on this store, as MLflow understands it on every kind of root."""
    local = storage.local_path("runs")
    return str(local) if local else storage.url("runs")


def _named_run(space: Workspace, key: str) -> RunRecord | None:
    try:
        run_id = str(space.storage.read_json(_key_file(key))["run_id"])
    except NotFound:
        return None
    where = redact(space.tracker.uri)
    try:
        record = space.tracker.get_run(run_id)
    except NotFound:
        raise ConfigError(
            f"The store at {space.storage.root_url} holds the run {run_id} of this config, but MLflow at {where} does "
            "not know it. Set MLFLOW_TRACKING_URI to where the run was made, or give it another name to start afresh."
        ) from None
    if record.deleted:
        raise ConfigError(
            f"The run {run_id} of this config was deleted in MLflow at {where}. Bring it back with `mlflow runs "
            f"restore --run-id {run_id}`, or give the config another name to start afresh."
        )
    return record


def _make_run(space: Workspace, request: RunRequest, dataset: DatasetRef, key: str) -> RunRecord:
    experiment_id = space.tracker.ensure_experiment(request.experiment, artifact_root(space.storage))
    orphans = space.tracker.find_runs(experiment_id, {RUN_KEY_TAG: key})
    record = orphans[0] if orphans else _create(space, request, dataset, key, experiment_id)
    document = {"run_id": record.run_id, "run_key": key, "name": request.name}
    if not space.storage.create(_key_file(key), json_document(document)):
        winner = _named_run(space, key)
        if winner is not None and winner.run_id != record.run_id:
            space.tracker.delete_run(record.run_id)
            return winner
    return record


def _create(space: Workspace, request: RunRequest, dataset: DatasetRef, key: str, experiment_id: str) -> RunRecord:
    tags = {
        RUN_KEY_TAG: key,
        NAME_TAG: request.name,
        "headrace.dataset": dataset.key,
        "headrace.dataset_digest": dataset.digest,
        "headrace.tokenizer_digest": dataset.tokenizer_digest,
        "headrace.code_digest": code_digest(),
    }
    return space.tracker.create_run(experiment_id, request.name, tags=tags)


def _key_file(key: str) -> str:
    return f"run-keys/{key}.json"


def _document(storage: Storage, run_id: str, key: str, request: RunRequest, dataset: DatasetRef) -> RunSpec:
    """Write `run.json` once, and return it with this command's execution fields."""
    wanted = RunSpec(
        format_version=1,
        run_id=run_id,
        run_key=key,
        name=request.name,
        seed=request.seed,
        model=request.model,
        training=request.training,
        optimizer=request.optimizer,
        schedule=request.schedule,
        dataset_key=dataset.key,
        dataset_digest=dataset.digest,
        tokenizer_digest=dataset.tokenizer_digest,
        evaluation=request.evaluation,
        checkpoint=request.checkpoint,
        layout=request.layout,
        launch=request.launch,
        stability=request.stability,
    )
    place = f"{wanted.run_prefix}/run.json"
    if storage.create(place, json_document(wanted.model_dump(mode="json"))):
        return wanted
    stored = read_run(storage, run_id)
    if stored.run_key != key:
        raise DamagedData(
            f"{storage.url(place)} is the document of another run (run key {stored.run_key[:12]}, not {key[:12]}). "
            "Move it away and run again."
        )
    return stored.model_copy(
        update={name: getattr(wanted, name) for name in ("evaluation", "checkpoint", "layout", "launch", "stability")}
    )


def read_run(storage: Storage, run_id: str) -> RunSpec:
    """A run's document; raises NotFound, or DamagedData when it cannot be read."""
    key = f"runs/{run_id}/artifacts/run.json"
    try:
        return RunSpec.model_validate(storage.read_json(key))
    except DamagedData as error:
        raise DamagedData(f"{error} {MADE_AGAIN}") from error
    except ValidationError as error:
        raise DamagedData(f"{storage.url(key)} is not the document of a run: {error} {MADE_AGAIN}") from error


def _related_run(space: Workspace, request: RunRequest, record: RunRecord) -> str | None:
    """A run of the same name with another identity: a changed field is never silently another run."""
    others = space.tracker.find_runs(record.experiment_id, {NAME_TAG: request.name})
    others = [other for other in others if RUN_KEY_TAG in other.tags and other.run_id != record.run_id]
    if not others:
        return None
    other = others[-1]
    known = space.tracker.params(other.run_id)
    changed = [
        f"{key} was {known.get(key)!r}, now {value!r}"
        for key, value in flatten(request.identity).items()
        if known.get(key) != value
    ]
    what = "; ".join(changed) if changed else "the data changed"
    return (
        f"This is a new run: {what} (against run {other.run_id}). To start from that run's weights, set "
        f"training.init_from to run:{other.run_id}@STEP."
    )


def _moved_experiment(space: Workspace, request: RunRequest, record: RunRecord) -> str | None:
    name = space.tracker.experiment_name(record.experiment_id)
    if name == request.experiment:
        return None
    return (
        f"The run was made in the experiment {name!r} and stays there; tracking.experiment {request.experiment!r} is "
        "for new runs."
    )


def flatten(document: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Leaves of nested mappings as `a.b` -> text; lists are leaves."""
    flat: dict[str, str] = {}
    for name, value in document.items():
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{prefix}{name}."))
        else:
            flat[f"{prefix}{name}"] = value if isinstance(value, str) else _as_text(value)
    return flat


def _as_text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, list | tuple) else str(value)
