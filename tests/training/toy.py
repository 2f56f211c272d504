"""A run small enough for tests: a made-up corpus, a tiny decoder, and the loop with nothing left out."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from data_prep.order import SampleOrder
from training.batches import Batch, Batches, Int64s, num_samples
from training.evaluation.evaluate import EvalResult
from training.loop import Outcome, Training, train
from training.model.loss import IGNORED
from training.optim.adamw import build_adamw
from training.optim.schedule import Schedule
from training.parallel.engine import Engine
from training.parallel.world import World
from training.run_spec import RestorePoint, RunSpec
from training.sink import Sink
from training.state import TrainState

PLAN_DIGEST = "a" * 64
MODEL = {
    "vocab_size": 67,
    "dim": 32,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "ffn_dim": 48,
    "max_seq_len": 16,
    "tie_embeddings": True,
}
TRAINING = {"steps": 3, "global_batch_size": 8, "seq_len": 16, "precision": "float64"}


def run_spec(**changes: dict[str, Any]) -> RunSpec:
    """The toy run; each keyword lays its fields over that part of it."""
    parts: dict[str, dict[str, Any]] = {
        "model": MODEL,
        "training": TRAINING,
        "optimizer": {"learning_rate": 1e-2, "max_grad_norm": 0.5},
        "schedule": {"warmup_steps": 2},
        "evaluation": {"every": 100},
        "checkpoint": {"save_every": 100},
        "layout": {"micro_batch_size": 8, "device": "cpu"},
        "launch": {},
    }
    merged = {name: {**part, **changes.pop(name, {})} for name, part in parts.items()}
    rest = {
        "run_id": "0" * 32,
        "run_key": "key",
        "name": "toy",
        "seed": 5,
        "dataset_key": "toy-0",
        "dataset_digest": PLAN_DIGEST,
        "tokenizer_digest": "b" * 64,
    }
    return RunSpec.model_validate({**rest, **merged, **changes})


class ArrayTokens:
    """A token stream in memory."""

    def __init__(self, tokens: Int64s, ends: Int64s | None = None) -> None:
        self._tokens = tokens
        self._ends = np.array([len(tokens)]) if ends is None else ends

    def __len__(self) -> int:
        return len(self._tokens)

    def read_many(self, starts: Int64s, length: int) -> Int64s:
        assert all(start + length <= len(self._tokens) for start in starts)
        return self._tokens[np.asarray(starts, dtype=np.int64)[:, None] + np.arange(length)]

    def document_ends(self, start: int, stop: int) -> Int64s:
        return self._ends[(self._ends > start) & (self._ends <= stop)]


def corpus(length: int, vocab_size: int, seed: int = 0) -> ArrayTokens:
    """Tokens that a model can learn something about: each is likely to follow from the one before."""
    generator = np.random.default_rng(seed)
    tokens = np.empty(length, dtype=np.int64)
    tokens[0] = 1
    jumps = generator.integers(0, vocab_size, length)
    follows = generator.random(length) < 0.7
    for i in range(1, length):
        tokens[i] = (tokens[i - 1] * 3 + 1) % vocab_size if follows[i] else jumps[i]
    return ArrayTokens(tokens, np.arange(50, length + 1, 50))


class UnevenBatches(Batches):
    """Batches whose sequences have from 1 to all of their targets, a function of the sample alone."""

    def read(self, position: int) -> Batch:
        batch = super().read(position)
        targets_BT = batch.targets_BT.clone()
        for row, index in enumerate(self.sample_indices(position)):
            targets_BT[row, 1 + int(index) * 7 % targets_BT.shape[1] :] = IGNORED
        return Batch(batch.tokens_BT, targets_BT)


class MemorySink(Sink):
    """Keeps the events of the rank that would write them."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank=rank)
        self.kept: list[dict[str, Any]] = []

    def event(self, kind: str, **fields: Any) -> None:
        self.kept.append({"kind": kind, **fields})

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.kept if event["kind"] == kind]


class Notebook:
    """A checkpointer that writes down what it was asked to do, and keeps copies in memory."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self.saved: dict[int, dict[str, Any]] = {}

    def save_async(self, state: TrainState, *, required: bool = False) -> bool:
        self.calls.append(("required" if required else "save", state.step))
        tensors = {name: tensor.clone() for name, tensor in state.tensors().items()}
        self.saved[state.step] = {"tensors": tensors, "values": state.values()}
        return True

    def poll(self) -> int | None:
        return None

    def wait(self) -> int | None:
        self.calls.append(("wait", 0))
        return None

    def load(self, state: TrainState, restore: RestorePoint) -> None:
        state.load_state_dict(self.saved[restore.step])


def no_evaluation() -> EvalResult:
    """Stands in for an evaluation that is not the matter of the test."""
    return EvalResult(math.nan, math.nan, math.nan, 0.0, 0, 0, [], [], [])


def toy_training(
    world: World, run: RunSpec, *, uneven: bool = False, should_stop: Callable[[], bool] = lambda: False
) -> Training:
    """Everything the loop works with, on one rank."""
    tokens = corpus(1000, run.model.vocab_size)
    samples = num_samples(len(tokens), run.training.seq_len)
    batches = (UnevenBatches if uneven else Batches)(
        tokens,
        SampleOrder(run.dataset_digest, run.seed, samples),
        seq_len=run.training.seq_len,
        global_batch_size=run.training.global_batch_size,
        dp_rank=world.dp_rank,
        dp=world.dp,
    )
    engine = Engine.build(run.model, world, precision=run.training.precision, seed=run.seed)
    optimizer = build_adamw(engine.parameters.values(), run.optimizer)
    schedule = Schedule.of(run.schedule, peak=run.optimizer.learning_rate, steps=run.training.steps)
    state = TrainState(engine.parameters, optimizer, schedule, world.rank)
    return Training(run, engine, state, batches, no_evaluation, Notebook(), MemorySink(world.rank), should_stop)


def run_toy(world: World, run: RunSpec, uneven: bool = False) -> dict[str, Any]:
    """Train to the end: the events of the steps, and all final weights whole."""
    training = toy_training(world, run, uneven=uneven)
    outcome: Outcome = train(training)
    assert outcome == "finished"
    assert isinstance(training.sink, MemorySink)
    return {"steps": training.sink.of_kind("step"), "weights": whole(training.engine.parameters)}


def whole(tensors: dict[str, Any]) -> dict[str, Any]:
    """Every tensor gathered from all ranks, as numpy."""
    return {name: _full(tensor).numpy() for name, tensor in tensors.items()}


def _full(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).to(torch.float64)


def alone() -> World:
    """One rank without a process group."""
    return World(0, 1, torch.device("cpu"))
