"""The training loop."""

import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from headrace.errors import Terminal
from headrace.faults import fault_factor, fault_point
from training.batches import Batches
from training.evaluation.evaluate import EvalResult
from training.health.rewind import Rewind, RewindRequest, SkipRange
from training.health.stability import Verdict, judge, remembered
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
    attempt: int = 1
    skip: tuple[SkipRange, ...] = ()
    """What the run passes over, since its rewinds."""
    ask_rewind: Callable[[RewindRequest], None] = lambda _: None
    """Makes a request to go back durable, on the rank that writes."""


def train(t: Training) -> Outcome:
    """Train to the last step, or to the next step boundary once any rank should stop; either way saved and committed.

    A bad batch is never applied. Every rank sees the same numbers, so all answer alike: they pass over it, or raise
    Rewind for the next attempt to go back, or raise Terminal.
    """
    run, state, engine, sink = t.run, t.state, t.engine, t.sink
    if state.step == 0:
        _evaluate(t)
    while state.step < run.training.steps:
        started = time.perf_counter()
        sink.phase("data", step=state.step)
        _pass_over(t)
        batch = t.batches.take(state.position).to(engine.world.device)
        waited = time.perf_counter() - started
        num_valid, stop = _agree(engine, batch.num_valid, t.should_stop())
        if stop:
            break

        sink.phase("forward_backward")
        loss = engine.forward_backward(batch, num_valid, run.layout.micro_batch_size)
        fault_point("step.middle", step=state.step + 1)
        loss *= fault_factor("step.loss", step=state.step + 1, position=state.position)
        sink.phase("optimizer")
        grad_norm = clip_gradients(engine.parameters.values(), run.optimizer.max_grad_norm)
        loss = engine.world.sum(loss)
        if verdict := judge(run.stability, state.recent_losses, float(loss), float(grad_norm)):
            _intervene(t, verdict, started)
            continue
        learning_rate = state.schedule.learning_rate(state.step + 1)
        set_learning_rate(state.optimizer, learning_rate)
        state.optimizer.step()
        state.optimizer.zero_grad(set_to_none=True)
        state.advance(sequences=run.training.global_batch_size, tokens=num_valid)
        state.recent_losses = remembered(run.stability, state.recent_losses, float(loss))

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
    started = time.perf_counter()
    t.checkpoints.save_async(state, required=True)
    t.checkpoints.wait()
    outcome: Outcome = "finished" if finished else "stopped"
    seconds = time.perf_counter() - started
    sink.event(outcome, step=state.step, tokens_seen=state.tokens_seen, save_seconds=seconds)
    return outcome


def _agree(engine: Engine, num_valid: int, stop: bool) -> tuple[int, bool]:
    """Tokens with a loss in the global batch, and whether any rank was asked to stop: one reduction for both."""
    both = torch.tensor([num_valid, int(stop)], dtype=torch.int64, device=engine.world.device)
    total, stopping = engine.world.sum(both).tolist()
    return int(total), bool(stopping)


def _pass_over(t: Training) -> None:
    """Leave out what rewinds decided to leave out."""
    while passed := next((passed for passed in t.skip if passed.reaches(t.state.position)), None):
        t.sink.event("range.skipped", step=t.state.step, start=t.state.position, stop=passed.stop)
        t.state.pass_over(passed.stop)


def _intervene(t: Training, verdict: Verdict, started: float) -> None:
    """Answer a bad batch, of which nothing was applied. Raises Terminal or Rewind, unless it is only passed over.

    `started` is when its step began, in the seconds of time.perf_counter().
    """
    state, stability, batch_size = t.state, t.run.stability, t.run.training.global_batch_size
    step = state.step + 1
    interventions = len(state.skipped) + sum(passed.stop > state.position for passed in t.skip)
    if verdict.answer == "stop" or interventions >= stability.max_interventions:
        raise Terminal(_why_it_stops(step, verdict, interventions))
    state.optimizer.zero_grad(set_to_none=True)
    if verdict.answer == "skip":
        seconds = time.perf_counter() - started
        t.sink.event("batch.skipped", step=step, position=state.position, reason=verdict.reason, seconds=seconds)
        state.pass_over(state.position + batch_size)
        return
    before = stability.rewind_batches - 1
    skip = SkipRange(start=max(0, state.position - before * batch_size), stop=state.position + batch_size)
    request = RewindRequest(
        format_version=1,
        attempt=t.attempt,
        step=step,
        reason=verdict.reason,
        last_good_step=max(0, state.step - before),
        skip=skip,
    )
    t.sink.event("rewind.asked", step=step, reason=verdict.reason, start=skip.start, stop=skip.stop)
    t.sink.phase("commit", step=state.step)
    if t.engine.world.is_main:
        t.ask_rewind(request)
    t.engine.world.barrier()  # no rank ends, and has the others killed, before the request is stored
    raise Rewind(
        f"Step {step} gave {verdict.reason}: the run goes back to step {request.last_good_step} or before and passes "
        f"over the sequences {skip.start} to {skip.stop - 1} of the sample order."
    )


def _why_it_stops(step: int, verdict: Verdict, interventions: int) -> str:
    message = f"Step {step} gave {verdict.reason}; nothing of it is saved. "
    if verdict.answer != "stop":
        message += (
            f"{interventions} batches were passed over or gone back for already (stability.max_interventions); raise "
            "that to go on. "
        )
    return message + "Lower optimizer.learning_rate or lengthen schedule.warmup_steps: that is another run."


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
