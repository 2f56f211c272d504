"""Training with real checkpoints on a real folder, for ranks that are forked by a test."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from headrace.events import EventWriter
from headrace.storage import Storage
from tests.training.toy import MemorySink, toy_training
from training.checkpoint.checkpointer import AsyncCheckpointer
from training.launch.attempts import claim_attempt, make_record
from training.loop import Training, train
from training.parallel.world import World
from training.rng import seed_rank
from training.run_spec import AttemptSpec, RestorePoint, RunSpec
from training.state import TrainState


class EventSink(MemorySink):
    """Passes the loop's events on to the attempt's log, as the real sink does."""

    def __init__(self, rank: int, log: EventWriter | None) -> None:
        super().__init__(rank)
        self._log = log

    def event(self, kind: str, **fields: Any) -> None:
        if self._log is not None:
            self._log.append(kind, **fields)


class PatientCheckpointer(AsyncCheckpointer):
    """Waits for the save before: toy steps are so short that most saves would be skipped, by chance which."""

    def save_async(self, state: TrainState, *, required: bool = False) -> bool:
        self.wait()
        return super().save_async(state, required=required)


def claim(folder: Path, run: RunSpec, restore: RestorePoint | None = None, attempt: int = 1) -> AttemptSpec:
    """Claim an attempt on the store in `folder`, as the launcher does."""
    storage = Storage.open(folder / "store")
    assert claim_attempt(storage, run.run_prefix, make_record(run, attempt, restore))
    return attempt_spec(folder, run, restore, attempt)


def attempt_spec(folder: Path, run: RunSpec, restore: RestorePoint | None = None, attempt: int = 1) -> AttemptSpec:
    return AttemptSpec(
        run=run,
        attempt=attempt,
        restore=restore,
        storage_root=str(folder / "store"),
        work_dir=str(folder / "work" / f"attempt-{attempt:04d}"),
    )


def plan_faults(folder: Path, *faults: dict[str, Any]) -> str:
    """Write a plan of faults; ranks use it through `use_faults`."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "faults.json"
    path.write_text(json.dumps({"dir": str(folder), "faults": list(faults)}), encoding="utf-8")
    return str(path)


def use_faults(path: str | None) -> None:
    if path is not None:
        os.environ["HEADRACE_FAULTS"] = path


def build(world: World, spec: AttemptSpec, kind: type[AsyncCheckpointer] = PatientCheckpointer) -> Training:
    """The toy run of one rank with real checkpoints, loaded when the spec says so."""
    events = EventWriter(spec.events_path, spec.attempt) if world.rank == 0 else None
    seed_rank(spec.run.seed, world.rank)
    training = toy_training(world, spec.run)
    checkpoints = kind(Storage.open(spec.storage_root), spec, events=events)
    if spec.restore is not None:
        checkpoints.load(training.state, spec.restore)
    return replace(training, checkpoints=checkpoints, sink=EventSink(world.rank, events))


def train_saved(world: World, spec: AttemptSpec, faults: str | None = None) -> dict[str, Any]:
    """Train to the end with checkpoints; the whole final state of this rank's view."""
    use_faults(faults)
    training = build(world, spec)
    assert train(training) == "finished"
    return contents(training)


def train_impatiently(world: World, spec: AttemptSpec, faults: str) -> None:
    """Train to the end with checkpoints as they are used in earnest."""
    use_faults(faults)
    assert train(build(world, spec, AsyncCheckpointer)) == "finished"


def contents(training: Training) -> dict[str, Any]:
    """Every tensor of the state, whole, as bytes: equal means equal bit for bit. Random states only of this rank."""
    tensors = {name: _whole_bytes(tensor) for name, tensor in sorted(training.state.tensors().items())}
    return {"tensors": tensors, "values": training.state.values()}


def load_contents(world: World, spec: AttemptSpec) -> dict[str, Any]:
    """What a checkpoint holds, as these ranks see it."""
    return contents(build(world, spec))


def perturb(training: Training) -> None:
    """Change every tensor of the state in place, as a training step does."""
    with torch.no_grad():
        for tensor in training.state.tensors().values():
            tensor.zero_()


def events_of(spec: AttemptSpec) -> list[dict[str, Any]]:
    return [json.loads(line) for line in spec.events_path.read_text(encoding="utf-8").splitlines()]


def barrier() -> None:
    dist.barrier()


def _whole_bytes(tensor: torch.Tensor) -> bytes:
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    array: np.ndarray[Any, Any] = whole.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return array.tobytes()
