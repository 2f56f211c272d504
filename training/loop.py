"""The training loop."""

import math
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from headrace.errors import Terminal
from headrace.faults import fault_point
from training.batches import Batches
from training.evaluation.evaluate import EvalResult
from training.optim.adamw import set_learning_rate
from training.optim.clip import clip_gradients
from training.parallel.engine import Engine
from training.run_spec import RunSpec
from training.sink import Sink
from training.state import Checkpointer, TrainState

Outcome = Literal["finished", "stopped"]


@dataclass(frozen=True)
class Training:
    """What the loop works with, on one rank."""

    run: RunSpec
    engine: Engine
    state: TrainState
    batches: Batches
    evaluate: Callable[[], EvalResult]
    checkpoints: Checkpointer
    sink: Sink
    should_stop: Callable[[], bool]


def train(t: Training) -> Outcome:
    """Train to the last step, or to the next step boundary once any rank should stop; either way saved and committed.

    Raises Terminal when the loss or the gradient is not finite: every rank sees the same numbers, so all decide alike.
    """
    run, state, engine, sink = t.run, t.state, t.engine, t.sink
    if state.step == 0:
        _evaluate(t)
    while state.step < run.training.steps:
        started = time.perf_counter()
        sink.phase("data", step=state.step)
        batch = t.batches.take(state.position).to(engine.world.device)
        waited = time.perf_counter() - started
        num_valid, stop = _agree(engine, batch.num_valid, t.should_stop())
        if stop:
            break

        sink.phase("forward_backward")
        loss = engine.forward_backward(batch, num_valid, run.layout.micro_batch_size)
        fault_point("step.middle", step=state.step + 1)
        sink.phase("optimizer")
        grad_norm = clip_gradients(engine.parameters.values(), run.optimizer.max_grad_norm)
        loss = engine.world.sum(loss)
        _require_finite(state.step + 1, loss, grad_norm)
        learning_rate = state.schedule.learning_rate(state.step + 1)
        set_learning_rate(state.optimizer, learning_rate)
        state.optimizer.step()
        state.optimizer.zero_grad(set_to_none=True)
        state.advance(sequences=run.training.global_batch_size, tokens=num_valid)

        seconds = time.perf_counter() - started
        sink.event(
            "step",
            step=state.step,
            loss=float(loss),
            grad_norm=float(grad_norm),
            learning_rate=learning_rate,
            tokens_seen=state.tokens_seen,
            tokens_per_second=num_valid / seconds,
            step_seconds=seconds,
            data_seconds=waited,
            memory_bytes=peak_memory_bytes(engine.world.device),
        )
        t.checkpoints.poll()
        if state.step % run.evaluation.every == 0 or state.step == run.training.steps:
            _evaluate(t)
        if state.step % run.checkpoint.save_every == 0 and state.step < run.training.steps:
            sink.phase("save", step=state.step)
            t.checkpoints.save_async(state)
    finished = state.step >= run.training.steps
    sink.phase("commit", step=state.step)
    t.checkpoints.save_async(state, required=True)
    t.checkpoints.wait()
    return "finished" if finished else "stopped"


def _agree(engine: Engine, num_valid: int, stop: bool) -> tuple[int, bool]:
    """Tokens with a loss in the global batch, and whether any rank was asked to stop: one reduction for both."""
    both = torch.tensor([num_valid, int(stop)], dtype=torch.int64, device=engine.world.device)
    total, stopping = engine.world.sum(both).tolist()
    return int(total), bool(stopping)


def _require_finite(step: int, loss: Tensor, grad_norm: Tensor) -> None:
    if not (math.isfinite(loss) and math.isfinite(grad_norm)):
        raise Terminal(
            f"Step {step} gave a loss of {float(loss)} and a gradient norm of {float(grad_norm)}; nothing of it is "
            "saved. Lower optimizer.learning_rate or lengthen schedule.warmup_steps: that is another run."
        )


def _evaluate(t: Training) -> None:
    t.sink.phase("evaluate", step=t.state.step)
    started = time.perf_counter()
    result = t.evaluate()
    t.sink.event(
        "evaluation",
        step=t.state.step,
        loss=result.loss,
        perplexity=result.perplexity,
        bits_per_byte=result.bits_per_byte,
        tokens=result.tokens,
        seconds=time.perf_counter() - started,
    )


def peak_memory_bytes(device: torch.device) -> int:
    """Most memory in use so far: of the device, or of this process on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
