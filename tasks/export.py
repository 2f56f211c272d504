"""The stage `export`: the last checkpoint becomes a Hugging Face folder, in place as an MLflow logged model.

MLflow chooses the model's id and with it the folder. `exports/<export key>.json` of the run, create-only, then decides
which logged model the export is; files and their commit follow; READY comes last.
"""

from dataclasses import dataclass
from typing import Literal

from prefect import task
from prefect.cache_policies import NO_CACHE

from headrace.commit import Commit, check_files, read_commit
from headrace.errors import DamagedData, NotFound
from headrace.mlmodel import mlmodel_document
from headrace.registry import ModelRecord, Registry
from headrace.storage import json_document
from tasks.child import run_module
from tasks.console import terminal
from tasks.exports import export_key, key_below, pointer_key
from tasks.policy import RETRY_DELAYS, SHORT_RETRIES, worth_another_try
from tasks.runs import Run, Workspace
from tasks.train import TrainResult
from training.export.spec import COMMIT_KIND, ExportSpec

ExportType = Literal["float32", "bfloat16"]

EXPORT_TAG = "headrace.export_key"
LOADER_MODULE = "training.export.pyfunc"


@dataclass(frozen=True)
class ExportResult:
    """The exported model of a run."""

    key: str
    """Digest of what was exported how."""
    model: ModelRecord
    prefix: str
    """Storage key of the folder."""
    commit: Commit
    step: int
    reused: bool


@task(
    name="export",
    retries=SHORT_RETRIES,
    retry_delay_seconds=RETRY_DELAYS,
    retry_condition_fn=worth_another_try,
    cache_policy=NO_CACHE,
    persist_result=False,
)
def export(space: Workspace, run: Run, training: TrainResult, dtype: ExportType) -> ExportResult:
    """Write the export, or find it."""
    checkpoint = training.checkpoint
    key = export_key(checkpoint.commit.digest, dtype)
    with terminal().stage("export") as stage:
        model = _logged_model(space, run, key)
        prefix = key_below(space.storage, model.location)
        commit = read_commit(space.storage, prefix, kind=COMMIT_KIND)
        damage = _damage(space, prefix, commit)
        if damage:
            stage.note(f"{damage} The export is written again, from the checkpoint of step {checkpoint.step}.")
        reused = commit is not None and model.ready and not damage
        if commit is None or damage:
            spec = ExportSpec(
                storage_root=space.storage.root_url,
                run_id=run.run_id,
                checkpoint=checkpoint.restore_point,
                target=prefix,
                dtype=dtype,
                extra_files={"MLmodel": _mlmodel(run, model)},
            )
            folder = space.work_dir / run.run_id / "export"
            run_module("training.export.main", spec.model_dump(mode="json"), folder=folder, on_report=lambda _: None)
            commit = read_commit(space.storage, prefix, kind=COMMIT_KIND)
        if commit is None:
            raise DamagedData(f"The export was made, but {space.storage.url(prefix)} has no commit.")
        if not model.ready:
            Registry(space.tracker).finish_model(model.model_id, run.run_id, checkpoint.step)
        size = sum(entry.size for entry in commit.files.values())
        stage.conclude(f"{'reused' if reused else 'written'}: {len(commit.files)} files, {size / 1e6:.1f} MB")
        return ExportResult(key, model, prefix, commit, checkpoint.step, reused)


def _damage(space: Workspace, prefix: str, commit: Commit | None) -> str:
    """What is wrong with the files of a commit: with their bytes in a folder, with their sizes on a remote store."""
    if commit is None:
        return ""
    try:
        check_files(space.storage, prefix, commit, content=space.storage.local_path(prefix) is not None)
    except DamagedData as error:
        return str(error)
    return ""


def _logged_model(space: Workspace, run: Run, key: str) -> ModelRecord:
    """The logged model that the run's store names for this export, made when there is none."""
    registry = Registry(space.tracker)
    if (named := _named(space, run, key)) is not None:
        return _known_model(registry, named)
    tags = {EXPORT_TAG: key, "headrace.run_id": run.run_id, "headrace.run_key": run.spec.run_key}
    model = registry.find_model(run.experiment_id, tags)
    if model is None:
        model = registry.create_model(run.experiment_id, run.spec.name, run_id=run.run_id, tags=tags)
    document = {"model_id": model.model_id, "prefix": key_below(space.storage, model.location)}
    if not space.storage.create(pointer_key(run.spec.run_prefix, key), json_document(document)):
        winner = _named(space, run, key)
        if winner is not None and winner != model.model_id:
            registry.discard_model(model.model_id)
            return _known_model(registry, winner)
    return model


def _named(space: Workspace, run: Run, key: str) -> str | None:
    try:
        return str(space.storage.read_json(pointer_key(run.spec.run_prefix, key))["model_id"])
    except NotFound:
        return None


def _known_model(registry: Registry, model_id: str) -> ModelRecord:
    try:
        return registry.get_model(model_id)
    except NotFound:
        raise NotFound(
            f"The run's export is the logged model {model_id}, but it was deleted in MLflow. Its files still lie on "
            "the store; to register the model again, give the config another name."
        ) from None


def _mlmodel(run: Run, model: ModelRecord) -> str:
    document = mlmodel_document(
        model_id=model.model_id, run_id=run.run_id, loader_module=LOADER_MODULE, created_ms=model.created_ms
    )
    return document.decode("utf-8")
