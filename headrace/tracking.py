"""The one way to MLflow: experiments, runs and metric points. Models and versions are in `headrace.registry`.

MLflow *shows* what the store knows; it decides nothing about data. Everything here may therefore be repeated: points
carry the time of their event, so that MLflow keeps a repeated batch once, and what is created is first looked for by
a tag that identifies it.
"""

import json
import os
import threading
import urllib.parse
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, Self

from headrace.errors import ConfigError, TrackingUnavailable
from headrace.file_lock import locked
from headrace.tracking_address import default_uri, redact, require_answer, sqlite_path
from headrace.tracking_errors import AlreadyExists, translated

if TYPE_CHECKING:
    from mlflow.entities import Experiment, LoggedModelOutput, Metric, Run
    from mlflow.tracking import MlflowClient

Status = Literal["RUNNING", "FINISHED", "FAILED", "KILLED"]

POINTS_IN_BATCH = 1000
"""Most metric points that MLflow takes in one call."""

PARAMS_IN_BATCH = 100
MAX_PARAM_LENGTH = 6000
DIGEST_LENGTH = 36
"""MLflow cuts no digest itself: it refuses longer ones."""

SETTINGS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "MLFLOW_LOGGING_LEVEL": "CRITICAL",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
}
"""Set before mlflow is imported unless the user set them: no telemetry, quiet, and answers within a minute."""


class Point(NamedTuple):
    """One value of one metric at one step; the same four fields written twice are one point."""

    key: str
    value: float
    step: int
    timestamp_ms: int


@dataclass(frozen=True)
class RunRecord:
    """What MLflow knows of a run."""

    run_id: str
    experiment_id: str
    name: str
    status: str
    artifact_root: str
    deleted: bool
    tags: Mapping[str, str]


class Tracker:
    """A client of one tracking store. Every method raises TrackingUnavailable when the store does not answer."""

    def __init__(self, uri: str, client: "MlflowClient") -> None:
        self.uri = uri
        self.client = client
        self._lock = threading.RLock()

    @classmethod
    def connect(cls, uri: str | None = None) -> Self:
        """Open the tracking store and ask it once.

        Raises TrackingUnavailable, naming the address, within seconds when it does not answer, and ConfigError for an
        address of another kind.
        """
        address = uri or default_uri()
        require_answer(address)
        with quiet_import():
            import mlflow.tracking  # noqa: F401 - loaded here, in silence, for all that follows
        # The first one makes the tables, and two at once would stand in each other's way.
        with _one_at_a_time(address), translated("opened", address):
            client = _new_client(address)
            client.search_experiments(max_results=1)
        return cls(address, client)

    @contextmanager
    def calls(self, what: str) -> Iterator[None]:
        """Calls of the client, one thread at a time; its failures become ours: away, not found, exists, or refused."""
        with self._lock, translated(what, self.uri):
            yield

    # ---------------------------------------------------------------------------------------------- experiments

    def ensure_experiment(self, name: str, artifact_root: str) -> str:
        """Id of the experiment whose runs keep their files below `artifact_root`; it is created when it is missing.

        MLflow fixes the artifact root when an experiment is created. Raises ConfigError when one of that name has
        another root, or was deleted.
        """
        found = self._experiment(name) or self._create_experiment(name, artifact_root)
        if found.lifecycle_stage != "active":
            raise ConfigError(
                f"The MLflow experiment {name!r} was deleted. Restore it with `mlflow experiments restore "
                f"--experiment-id {found.experiment_id}`, or set tracking.experiment to another name."
            )
        if _as_place(found.artifact_location) == _as_place(artifact_root):
            return str(found.experiment_id)
        raise ConfigError(
            f"The MLflow experiment {name!r} keeps its files in {found.artifact_location}, but this run's store needs "
            f"{artifact_root}, and MLflow cannot move an experiment. Set tracking.experiment to a name that is not "
            "taken, or storage.root to the store that the experiment was made for."
        )

    def _experiment(self, name: str) -> "Experiment | None":
        with self.calls("asked for the experiment"):
            return self.client.get_experiment_by_name(name)

    def experiments(self) -> list[str]:
        """Ids of all experiments."""
        with self.calls("asked for its experiments"):
            return [str(experiment.experiment_id) for experiment in self.client.search_experiments()]

    def find_experiment(self, name: str) -> str | None:
        """Id of an experiment that is there and not deleted, or None."""
        found = self._experiment(name)
        return str(found.experiment_id) if found is not None and found.lifecycle_stage == "active" else None

    def experiment_name(self, experiment_id: str) -> str:
        """Name of an experiment; raises NotFound."""
        with self.calls(f"asked for the experiment {experiment_id}"):
            return str(self.client.get_experiment(experiment_id).name)

    def _create_experiment(self, name: str, artifact_root: str) -> "Experiment":
        try:
            with self.calls("asked for a new experiment"):
                self.client.create_experiment(name, artifact_location=artifact_root)
        except AlreadyExists:
            pass  # another process was faster
        found = self._experiment(name)
        if found is None:
            raise TrackingUnavailable(f"MLflow at {redact(self.uri)} does not show the experiment {name!r} it created.")
        return found

    # ------------------------------------------------------------------------------------------------------ runs

    def create_run(
        self, experiment_id: str, name: str, *, tags: Mapping[str, str], parent_id: str | None = None
    ) -> RunRecord:
        """Create a run with status RUNNING; with `parent_id` it is shown nested below that run."""
        nested = {"mlflow.parentRunId": parent_id} if parent_id else {}
        with self.calls("asked for a new run"):
            run = self.client.create_run(
                experiment_id, run_name=name, tags={"mlflow.source.name": "headrace", **tags, **nested}
            )
        return _run_record(run)

    def get_run(self, run_id: str) -> RunRecord:
        """What MLflow knows of a run; raises NotFound."""
        with self.calls(f"asked for the run {run_id}"):
            return _run_record(self.client.get_run(run_id))

    def find_runs(
        self, experiment_id: str, tags: Mapping[str, str], *, status: Status | None = None
    ) -> list[RunRecord]:
        """The experiment's runs that carry all of `tags` and have the status, oldest first, without deleted ones."""
        rules = [f"tags.`{key}` = '{value}'" for key, value in tags.items()]
        rule = " and ".join(rules + ([f"attributes.status = '{status}'"] if status else []))
        records: list[RunRecord] = []
        token: str | None = None
        while True:
            with self.calls("searched for runs"):
                page = self.client.search_runs(
                    [experiment_id], rule, max_results=1000, order_by=["attributes.start_time ASC"], page_token=token
                )
            records += [_run_record(run) for run in page]
            token = page.token
            if not token:
                return records

    def children(self, experiment_id: str, parent_id: str) -> list[RunRecord]:
        """The runs nested below a run, oldest first."""
        return self.find_runs(experiment_id, {"mlflow.parentRunId": parent_id})

    def delete_run(self, run_id: str) -> None:
        """Move a run to MLflow's bin."""
        with self.calls(f"asked to delete the run {run_id}"):
            self.client.delete_run(run_id)

    def set_status(self, run_id: str, status: Status) -> None:
        """Say what is true of a run now; a final status also stamps its end."""
        with self.calls(f"told the status of the run {run_id}"):
            if status == "RUNNING":
                self.client.update_run(run_id, status=status)
            else:
                self.client.set_terminated(run_id, status=status)

    def set_tags(self, run_id: str, tags: Mapping[str, str]) -> None:
        """Write tags of a run; a tag that exists is replaced."""
        from mlflow.entities import RunTag

        with self.calls(f"told tags of the run {run_id}"):
            self.client.log_batch(run_id, tags=[RunTag(key, value) for key, value in tags.items()])

    def log_params(self, run_id: str, params: Mapping[str, str]) -> None:
        """Write the parameters that the run does not have yet: MLflow refuses a second, different value."""
        from mlflow.entities import Param

        with self.calls(f"told parameters of the run {run_id}"):
            known = self.client.get_run(run_id).data.params
            new = [Param(key, value[:MAX_PARAM_LENGTH]) for key, value in params.items() if key not in known]
            for start in range(0, len(new), PARAMS_IN_BATCH):
                self.client.log_batch(run_id, params=new[start : start + PARAMS_IN_BATCH])

    def params(self, run_id: str) -> dict[str, str]:
        """The parameters of a run."""
        with self.calls(f"asked for the run {run_id}"):
            return dict(self.client.get_run(run_id).data.params)

    def log_points(self, run_id: str, points: Sequence[Point]) -> None:
        """Write metric points; a point that is there already stays one point."""
        for start in range(0, len(points), POINTS_IN_BATCH):
            batch = metric_entities(points[start : start + POINTS_IN_BATCH])
            with self.calls(f"told metrics of the run {run_id}"):
                self.client.log_batch(run_id, metrics=batch)

    def last_steps(self, run_id: str) -> dict[str, int]:
        """The highest step of each metric of a run: nothing at or below it may be written again."""
        with self.calls(f"asked for the run {run_id}"):
            return {metric.key: metric.step for metric in self.client.get_run(run_id).data.to_proto().metrics}

    def history(self, run_id: str, key: str) -> list[Point]:
        """Every point of one metric, by step and time."""
        with self.calls(f"asked for the metric {key} of the run {run_id}"):
            found = self.client.get_metric_history(run_id, key)
        points = [Point(m.key, m.value, m.step, m.timestamp) for m in found]
        return sorted(points, key=lambda point: (point.step, point.timestamp_ms))

    def log_dataset(self, run_id: str, *, name: str, digest: str, source: str) -> None:
        """Show on the run which dataset it was trained on: its manifest's digest, and where it lies."""
        from mlflow.entities import Dataset, DatasetInput, InputTag

        known = digest[:DIGEST_LENGTH]
        with self.calls(f"told the dataset of the run {run_id}"):
            inputs = self.client.get_run(run_id).inputs
            if any(used.dataset.digest == known for used in (inputs.dataset_inputs if inputs else [])):
                return
            place = json.dumps({"uri": source})
            dataset = Dataset(name=name, digest=known, source_type="external", source=place)
            used = DatasetInput(dataset, [InputTag("mlflow.data.context", "training")])
            self.client.log_inputs(run_id, datasets=[used])


def metric_entities(
    points: Sequence[Point], *, model_id: str | None = None, dataset_name: str | None = None, digest: str | None = None
) -> list["Metric"]:
    """Points as MLflow's own objects; with `model_id` they are metrics of that logged model."""
    from mlflow.entities import Metric

    cut = digest[:DIGEST_LENGTH] if digest else None
    return [
        Metric(
            p.key,
            p.value,
            p.timestamp_ms,
            p.step,
            model_id=model_id,
            dataset_name=dataset_name,
            dataset_digest=cut,
            run_id=None,
        )
        for p in points
    ]


def model_output(model_id: str, step: int) -> "LoggedModelOutput":
    """The note on a run that it made this logged model at this step."""
    from mlflow.entities import LoggedModelOutput

    return LoggedModelOutput(model_id, step)


def _one_at_a_time(uri: str) -> AbstractContextManager[None]:
    path = sqlite_path(uri)
    return locked(path.with_name(f"{path.name}.lock")) if path else nullcontext()


@contextmanager
def quiet_import() -> Iterator[None]:
    """Import from mlflow with our settings; it warns about its own type hints while it is loaded."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _new_client(uri: str) -> "MlflowClient":
    from mlflow.tracking import MlflowClient

    return MlflowClient(tracking_uri=uri, registry_uri=os.environ.get("MLFLOW_REGISTRY_URI") or uri)


def _as_place(url: str) -> str:
    """An artifact root in one spelling: `file:///x/`, `/x` and a relative path are the same place."""
    path = urllib.parse.unquote(url.removeprefix("file://")) if url.startswith("file:") else url
    if "://" in path:
        return path.rstrip("/")
    return str(Path(path).resolve())


def _run_record(run: "Run") -> RunRecord:
    return RunRecord(
        run_id=run.info.run_id,
        experiment_id=run.info.experiment_id,
        name=run.info.run_name or "",
        status=run.info.status,
        artifact_root=run.info.artifact_uri,
        deleted=run.info.lifecycle_stage != "active",
        tags=dict(run.data.tags),
    )
