"""Logged models, registered versions and aliases: what MLflow shows of an export.

An export lies in place below the logged model's location, so a version refers to it and copies nothing. Models and
versions are found again by tags that name their content; a repeated call never makes a second one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.errors import NotFound, Terminal
from headrace.tracking import DIGEST_LENGTH, Point, Tracker, metric_entities, model_output
from headrace.tracking_address import is_server
from headrace.tracking_errors import AlreadyExists

if TYPE_CHECKING:
    from mlflow.entities import LoggedModel
    from mlflow.entities.model_registry import ModelVersion

_NOT_IN_NAMES = str.maketrans(dict.fromkeys("/:.%\"'", "-"))


@dataclass(frozen=True)
class ModelRecord:
    """One logged model: its files lie in `location`, complete when it is `ready`."""

    model_id: str
    location: str
    ready: bool
    created_ms: int
    tags: Mapping[str, str]
    measured_on: frozenset[str] = frozenset()
    """Digests (as MLflow cuts them) of the evaluations whose metrics it shows."""


@dataclass(frozen=True)
class VersionRecord:
    """One version of a registered model."""

    name: str
    version: str
    run_id: str
    tags: Mapping[str, str]


class Registry:
    """The model side of a tracking store. Every method raises TrackingUnavailable when the store does not answer."""

    def __init__(self, tracker: Tracker) -> None:
        self.tracker = tracker
        self._client = tracker.client

    # ---------------------------------------------------------------------------------------------- logged models

    def find_model(self, experiment_id: str, tags: Mapping[str, str]) -> ModelRecord | None:
        """The logged model that carries all of `tags`: the ready one, else the oldest that waits for its files."""
        rule = " AND ".join(f"tags.`{key}` = '{value}'" for key, value in tags.items())
        with self.tracker.calls("searched for a logged model"):
            found = list(self._client.search_logged_models([experiment_id], filter_string=rule))
        usable = [_model_record(model) for model in found if str(model.status) in ("READY", "PENDING")]
        return min(usable, key=lambda model: (not model.ready, model.created_ms, model.model_id), default=None)

    def create_model(self, experiment_id: str, name: str, *, run_id: str, tags: Mapping[str, str]) -> ModelRecord:
        """Create a logged model that waits for its files."""
        with self.tracker.calls("asked for a new logged model"):
            model = self._client.create_logged_model(
                experiment_id,
                name=name.translate(_NOT_IN_NAMES),
                source_run_id=run_id,
                tags=dict(tags),
                model_type="language-model",
            )
        return _model_record(model)

    def get_model(self, model_id: str) -> ModelRecord:
        """A logged model by its id; raises NotFound."""
        with self.tracker.calls(f"asked for the logged model {model_id}"):
            return _model_record(self._client.get_logged_model(model_id))

    def finish_model(self, model_id: str, run_id: str, step: int) -> None:
        """Say that all files of a logged model are in place, and show it on the page of the run that made it."""
        with self.tracker.calls(f"told that the logged model {model_id} is ready"):
            self._client.finalize_logged_model(model_id, "READY")
            outputs = self._client.get_run(run_id).outputs
            known = [output.model_id for output in outputs.model_outputs] if outputs else []
            if model_id not in known:
                self._client.log_outputs(run_id, [model_output(model_id, step)])

    def discard_model(self, model_id: str) -> None:
        """Remove a logged model that nobody refers to."""
        with self.tracker.calls(f"asked to delete the logged model {model_id}"):
            self._client.delete_logged_model(model_id)

    def log_model_points(
        self, run_id: str, model_id: str, points: Sequence[Point], *, dataset_name: str, digest: str
    ) -> None:
        """Write metrics of a logged model, measured on the dataset of this name and digest; once for each digest.

        MLflow writes them on the run as well, where a metric has one value at a step: those of a further digest carry
        the beginning of it in their names.
        """
        known = self.get_model(model_id).measured_on
        if digest[:DIGEST_LENGTH] in known:
            return
        named = [point._replace(key=f"{point.key}.{digest[:8]}") for point in points] if known else points
        metrics = metric_entities(named, model_id=model_id, dataset_name=dataset_name, digest=digest)
        with self.tracker.calls(f"told metrics of the logged model {model_id}"):
            self._client.log_batch(run_id, metrics=metrics)

    # --------------------------------------------------------------------------------------------------- versions

    def names(self) -> list[str]:
        """Names of all registered models."""
        found: list[str] = []
        token: str | None = None
        while True:
            with self.tracker.calls("asked for the registered models"):
                page = self._client.search_registered_models(page_token=token)
            found.extend(model.name for model in page)
            token = page.token
            if not token:
                return sorted(found)

    def versions(self, name: str) -> list[VersionRecord]:
        """Every version of a registered model, oldest first; none when there is no such model."""
        with self.tracker.calls(f"asked for the versions of {name}"):
            found = [_version_record(version) for version in self._client.search_model_versions(f"name = '{name}'")]
        return sorted(found, key=lambda version: int(version.version))

    def find_version(self, name: str, tags: Mapping[str, str]) -> VersionRecord | None:
        """The oldest version of a registered model that carries all of `tags`."""
        matching = (v for v in self.versions(name) if all(v.tags.get(key) == value for key, value in tags.items()))
        return next(matching, None)

    def get_version(self, name: str, version: str) -> VersionRecord:
        """One version of a registered model; raises NotFound."""
        with self.tracker.calls(f"asked for version {version} of {name}"):
            return _version_record(self._client.get_model_version(name, version))

    def create_version(self, name: str, model: ModelRecord, *, run_id: str, tags: Mapping[str, str]) -> VersionRecord:
        """Register a logged model by reference, with its tags, in one call."""
        # A server refuses a local path as source; MLflow's own database client resolves `models:/` only through a
        # process-wide address that nobody here sets.
        source = f"models:/{model.model_id}" if is_server(self.tracker.uri) else model.location
        try:
            with self.tracker.calls(f"asked for the registered model {name}"):
                self._client.create_registered_model(name)
        except AlreadyExists:
            pass  # its next version then
        with self.tracker.calls(f"asked for a new version of {name}"):
            version = self._client.create_model_version(
                name,
                source=source,
                run_id=run_id,
                tags=dict(tags),
                model_id=model.model_id,
            )
        return _version_record(version)

    def set_version_tags(self, name: str, version: str, tags: Mapping[str, str]) -> None:
        """Write tags of a version; a tag that exists is replaced."""
        with self.tracker.calls(f"told tags of version {version} of {name}"):
            for key, value in tags.items():
                self._client.set_model_version_tag(name, version, key, value)

    # ---------------------------------------------------------------------------------------------------- aliases

    def version_by_alias(self, name: str, alias: str) -> VersionRecord | None:
        """The version that an alias points to, or None."""
        try:
            with self.tracker.calls(f"asked for {name}@{alias}"):
                return _version_record(self._client.get_model_version_by_alias(name, alias))
        except NotFound:
            return None
        except Terminal as error:
            if "alias" in str(error) and "not found" in str(error):
                return None  # MLflow calls a missing alias an invalid parameter
            raise

    def set_alias(self, name: str, alias: str, version: str) -> None:
        """Point an alias at a version, in one atomic call."""
        with self.tracker.calls(f"told the alias {alias} of {name}"):
            self._client.set_registered_model_alias(name, alias, version)


def _model_record(model: "LoggedModel") -> ModelRecord:
    return ModelRecord(
        model_id=model.model_id,
        location=model.artifact_location,
        ready=str(model.status) == "READY",
        created_ms=model.creation_timestamp,
        tags=dict(model.tags or {}),
        measured_on=frozenset(m.dataset_digest for m in model.metrics or [] if m.dataset_digest),
    )


def _version_record(version: "ModelVersion") -> VersionRecord:
    return VersionRecord(
        name=version.name,
        version=str(version.version),
        run_id=version.run_id or "",
        tags=dict(version.tags or {}),
    )
