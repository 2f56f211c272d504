"""Stand-ins for what the tasks start: a process group that trains, and stage processes; and a small run to start."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data_prep.config import DataConfig, InputConfig
from headrace.commit import FileEntry, write_commit
from headrace.events import EventTail, EventWriter
from headrace.storage import Storage
from headrace.tracking import Tracker
from tasks.runs import DatasetRef, RunRequest, Workspace, read_run
from tests.mlflow_database import new_database
from training.checkpoint.catalog import checkpoint_prefix
from training.checkpoint.config import CheckpointConfig
from training.config import TrainingConfig
from training.evaluation.config import EvaluationConfig
from training.health.config import StabilityConfig
from training.launch.config import LaunchConfig
from training.launch.diagnosis import AttemptOutcome
from training.launch.supervisor import is_finished
from training.model.config import ModelConfig
from training.optim.config import OptimizerConfig, ScheduleConfig
from training.parallel.config import LayoutConfig
from training.run_spec import AttemptSpec

DATA = DataConfig(name="tiny", inputs=(InputConfig(path="texts"),))
DATASET = DatasetRef("tiny-0123456789abcdef", "d" * 64, "e" * 64)


def make_workspace(folder: Path) -> Workspace:
    """A store, a tracking store and a scratch folder below `folder`."""
    tracker = Tracker.connect(f"sqlite:///{new_database(folder)}")
    return Workspace(Storage.open(str(folder / "store")), tracker, folder / "work")


def make_request(**changes: Any) -> RunRequest:
    """A request for twelve steps; `changes` replace whole parts, and identity fields by dotted name."""
    identity = {"name": "tiny", "optimizer": {"learning_rate": 0.003}, "training": {"steps": 12}}
    parts: dict[str, Any] = {
        "name": "tiny",
        "seed": 1,
        "experiment": "here",
        "identity": identity,
        "model": ModelConfig(
            vocab_size=512, dim=32, num_layers=2, num_heads=2, num_kv_heads=1, ffn_dim=64, max_seq_len=32
        ),
        "training": TrainingConfig(steps=12, global_batch_size=8, seq_len=32, precision="float32"),
        "optimizer": OptimizerConfig(),
        "schedule": ScheduleConfig(warmup_steps=2),
        "evaluation": EvaluationConfig(),
        "checkpoint": CheckpointConfig(save_every=4),
        "layout": LayoutConfig(micro_batch_size=4),
        "launch": LaunchConfig(ranks_per_node=2),
        "stability": StabilityConfig(),
    }
    return RunRequest(**{**parts, **changes})


def commit_checkpoint(storage: Storage, spec: AttemptSpec, step: int) -> None:
    """What the ranks leave of a save."""
    run = spec.run
    prefix = checkpoint_prefix(run.run_prefix, step=step, attempt=spec.attempt)
    data = f"state of step {step}".encode()
    storage.write_bytes(f"{prefix}/rank-0000.bin", data)
    body = {
        "run_id": run.run_id,
        "run_key": run.run_key,
        "step": step,
        "attempt": spec.attempt,
        "model": run.model.model_dump(mode="json"),
        "dataset_digest": run.dataset_digest,
        "tokenizer_digest": run.tokenizer_digest,
    }
    write_commit(storage, prefix, kind="checkpoint", body=body, files={"rank-0000.bin": FileEntry.of_bytes(data)})


@dataclass
class FakeRanks:
    """Stands for `run_attempt`: steps, saves and events as the ranks make them, and an end for each launch."""

    ends: list[Any] = field(default_factory=list)
    """For each launch: None to finish; a step to be killed after; or (step, how), where how is raised or returned."""
    specs: list[AttemptSpec] = field(default_factory=list)

    def __call__(
        self,
        storage: Storage,
        spec: AttemptSpec,
        *,
        on_event: Callable[[dict[str, Any]], None],
        should_stop: Callable[[], bool],
    ) -> AttemptOutcome:
        number = len(self.specs)
        end = self.ends[number] if number < len(self.ends) else None
        last, how = end if isinstance(end, tuple) else (end, None)
        self.specs.append(spec)
        spec.write()
        writer, tail = EventWriter(spec.events_path, spec.attempt), EventTail(spec.events_path)
        try:
            outcome = self._train(storage, spec, writer, last or spec.run.training.steps, should_stop)
            if isinstance(how, BaseException):
                raise how
        finally:
            writer.close()
            for event in tail.new():
                on_event(event)
        return how or outcome

    def _train(
        self, storage: Storage, spec: AttemptSpec, writer: EventWriter, last: int, should_stop: Callable[[], bool]
    ) -> AttemptOutcome:
        first = spec.restore.step if spec.restore else 0
        if first == 0:
            writer.append("evaluation", step=0, loss=6.0, perplexity=400.0, bits_per_byte=4.5, tokens=9, seconds=0.1)
        for step in range(first + 1, last + 1):
            if should_stop():
                return AttemptOutcome(kind="stopped", message="Stopped.", step=step)
            numbers = {"loss": 6.0 / step, "grad_norm": 1.0, "tokens_per_second": 100.0}
            writer.append("step", step=step, **numbers, step_seconds=0.01, data_seconds=0.001)
            if step % spec.run.checkpoint.save_every == 0 or step == spec.run.training.steps:
                writer.append("save.begun", step=step)
                writer.publish(storage, spec.run.run_prefix)
                commit_checkpoint(storage, spec, step)
                writer.append("save.committed", step=step, seconds=0.1, bytes=10)
        if is_finished(storage, spec.run):
            writer.append("finished", step=last, tokens_seen=1, save_seconds=0.1)
            writer.publish(storage, spec.run.run_prefix)
            return AttemptOutcome(kind="finished", message="Finished.", step=last)
        return AttemptOutcome(kind="failed", message=f"Rank 1 was killed (launch {len(self.specs)}).")


@dataclass
class FakeStages:
    """Stands for `run_module`: writes what the export and the evaluation leave on the store."""

    storage: Storage
    scores: dict[str, float] = field(default_factory=dict)
    """Bits per byte of a model, by its folder; 2.0 for others."""
    documents: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    """Bytes and nats of each document that a model scores, by its folder."""
    limited: list[tuple[int, float]] | None = None
    """The same for every evaluation of a part of the split."""
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def __call__(self, module: str, spec: dict[str, Any], *, folder: Path, on_report: Any) -> dict[str, Any]:
        self.calls.append((module, spec))
        return self._export(spec) if module == "training.export.main" else self._evaluate(spec, on_report)

    def _export(self, spec: dict[str, Any]) -> dict[str, Any]:
        files = {
            "model.safetensors": b"w" * 10,
            "tokenizer.json": b"{}",
            "tokenizer_config.json": b'{"eos_token": "<|end|>"}',
            "MLmodel": spec["extra_files"]["MLmodel"].encode(),
        }
        for name, data in files.items():
            self.storage.write_bytes(f"{spec['target']}/{name}", data)
        body = {
            "run_id": spec["run_id"],
            "step": spec["checkpoint"]["step"],
            "checkpoint_digest": "c" * 64,
            "dtype": spec["dtype"],
            "tokenizer_digest": read_run(self.storage, spec["run_id"]).tokenizer_digest,
        }
        entries = {name: FileEntry.of_bytes(data) for name, data in files.items()}
        write_commit(self.storage, spec["target"], kind="export", body=body, files=entries)
        return {"target": spec["target"]}

    def _evaluate(self, spec: dict[str, Any], on_report: Any) -> dict[str, Any]:
        on_report({"progress": 3, "total": 4})
        score = self.scores.get(spec["model"], 2.0)
        body = {
            "summary": {"loss": 3.0, "perplexity": 20.0, "bits_per_byte": score, "tokens": 100, "bytes": 200},
            "baselines": {"unigram_bits_per_byte": 3.5, "bigram_bits_per_byte": 3.0},
        }
        scored = self.documents.get(spec["model"], [])
        if spec["spec"]["max_tokens"] is not None and self.limited is not None:
            scored = self.limited
        documents = [
            {"document": number, "tokens": size, "bytes": size, "nats": nats}
            for number, (size, nats) in enumerate(scored)
        ]
        data = b"".join(json.dumps(document).encode() + b"\n" for document in documents)
        self.storage.write_bytes(f"{spec['target']}/documents.jsonl", data)
        write_commit(self.storage, spec["target"], kind="evaluation", body=body, files={})
        return {"target": spec["target"]}


class Killed(BaseException):
    """Ends the code at some point, as a signal would."""


def die(*_: Any, **__: Any) -> None:
    """Stands for any function at which the process is killed."""
    raise Killed


class DeadMirror:
    """A mirror whose process is gone: nothing arrives in MLflow."""

    attempt_run_id = None

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __call__(self, event: dict[str, Any]) -> None: ...

    def close(self, timeout_seconds: float) -> bool:
        return False
