"""What a run is and what one launch of it gets: the two documents between the planner of a run and its ranks.

`RunSpec` is written once to `<run prefix>/run.json` and is the authority for every attempt. `AttemptSpec` is the
local file that one launch of the process group reads: the same run, with the execution fields of this attempt, the
attempt number, and the committed checkpoint it starts from. No torch here: flows and the launcher import this.
"""

import json
from pathlib import Path
from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveInt, ValidationError

from headrace.config import Part
from headrace.errors import InputError
from training.checkpoint.config import CheckpointConfig
from training.config import TrainingConfig
from training.evaluation.config import EvaluationConfig
from training.health.config import StabilityConfig
from training.health.rewind import SkipRange
from training.launch.config import LaunchConfig
from training.model.config import ModelConfig
from training.optim.config import OptimizerConfig, ScheduleConfig
from training.parallel.config import LayoutConfig

FORMAT_VERSION: Literal[1] = 1


class RestorePoint(Part):
    """A committed checkpoint of this run, named by the attempt that wrote it and the step it holds."""

    attempt: PositiveInt = Field(description="number of the attempt that wrote the checkpoint")
    step: NonNegativeInt = Field(description="completed optimizer steps in the checkpoint")


class RunSpec(Part):
    """The resolved config of a run (`run.json`); execution parts are those of the first attempt."""

    format_version: Literal[1] = Field(FORMAT_VERSION, description="version of this document's format")
    run_id: str = Field(description="MLflow run id, and the name of the run's directory on the store")
    run_key: str = Field(description="digest of the training identity: the same key continues the same run")
    name: str = Field(description="the run's name for people")
    seed: NonNegativeInt = Field(description="seed of the weights' initial values and of the sample order")
    model: ModelConfig
    training: TrainingConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    dataset_key: str = Field(description="directory name of the dataset below `datasets/`")
    dataset_digest: str = Field(description="commit digest of the dataset's manifest")
    tokenizer_digest: str = Field(description="digest of the dataset's tokenizer")
    evaluation: EvaluationConfig
    checkpoint: CheckpointConfig
    layout: LayoutConfig
    launch: LaunchConfig
    stability: StabilityConfig = StabilityConfig()

    @property
    def run_prefix(self) -> str:
        """Storage key of the run's artifact root."""
        return f"runs/{self.run_id}/artifacts"


class AttemptSpec(Part):
    """One launch of the process group: what `python -m training.main <work_dir>/attempt.json` reads."""

    run: RunSpec = Field(description="the run, with this attempt's execution parts")
    attempt: PositiveInt = Field(description="number of this attempt, claimed on the store")
    restore: RestorePoint | None = Field(None, description="checkpoint to start from; none: from the initial weights")
    skip: tuple[SkipRange, ...] = Field((), description="what the run passes over, since its rewinds")
    storage_root: str = Field(description="URL of the store")
    work_dir: str = Field(description="local directory of this attempt: heartbeats, events, logs, results")

    @property
    def work_path(self) -> Path:
        """The attempt's local directory."""
        return Path(self.work_dir)

    def heartbeat_path(self, rank: int) -> Path:
        """Where a rank says which step and phase it is in."""
        return self.work_path / "heartbeats" / f"rank-{rank}.json"

    def result_path(self, rank: int) -> Path:
        """Where a rank leaves its outcome: an exit code alone cannot tell a teardown crash from a failure."""
        return self.work_path / f"result-rank-{rank}.json"

    @property
    def events_path(self) -> Path:
        """Rank 0's event log."""
        return self.work_path / "events.jsonl"

    def write(self) -> Path:
        """Write `attempt.json` into the work directory and return its path."""
        self.work_path.mkdir(parents=True, exist_ok=True)
        path = self.work_path / "attempt.json"
        path.write_text(self.model_dump_json(indent=2), encoding="utf-8")
        return path


def read_attempt(path: Path) -> AttemptSpec:
    """Read an attempt file; raises InputError when it is missing or not one of ours."""
    try:
        return AttemptSpec.model_validate(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError as error:
        raise InputError(f"There is no attempt file at {path}.") from error
    except (json.JSONDecodeError, ValidationError) as error:
        raise InputError(f"{path} is not an attempt file of this version: {error}") from error


class RankResult(Part):
    """What a rank leaves behind in `result-rank-N.json`; its absence means that the rank was killed."""

    rank: NonNegativeInt
    outcome: Literal["finished", "stopped", "failed"]
    step: NonNegativeInt = Field(description="completed optimizer steps when the rank left")
    exit_code: NonNegativeInt
    error_kind: str | None = Field(None, description="class name of the error, when failed")
    message: str | None = Field(None, description="the error in one sentence, when failed")
    retryable: bool | None = Field(None, description="whether another attempt can help, when failed")
    secondary: bool = Field(False, description="the failure is the echo of another rank's (a closed connection)")
    time: float = Field(description="seconds since the epoch when the result was written")
