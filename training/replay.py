"""One step of a run again, in one process: the exact batch, weights and random state that it had.

    python -m training.replay spec.json

Starts from the newest usable checkpoint before the step (or from the initial weights) and trains up to it, writing
nothing anywhere. The last line on standard output is one JSON object: each step with its loss and gradient norm, as
they are now and as they were logged, or `error` and `retryable`.

The sequences are divided as the ranks divided them, micro-batch by micro-batch: what is rounded to bfloat16 is then
rounded alike, and only the order of the sums over ranks differs.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pydantic import Field, PositiveInt

from headrace.config import Part
from headrace.errors import DamagedData, InputError
from headrace.events import read_events
from headrace.storage import Storage
from training.batches import Batches
from training.checkpoint.catalog import Checkpoint, list_commits, require_same_run
from training.checkpoint.reader import read_tensors
from training.evaluation.evaluate import EvalResult
from training.launch.attempts import AttemptRecord, chain, read_attempts
from training.loop import Training, train
from training.main import open_batches, open_run_dataset
from training.model.init import load_weights
from training.optim.adamw import build_adamw
from training.optim.schedule import Schedule
from training.origin import read_origin
from training.parallel.config import LayoutConfig
from training.parallel.engine import Engine
from training.parallel.world import World, detect_device
from training.program import run_program, say
from training.rng import seed_rank
from training.run_spec import RestorePoint, RunSpec
from training.sink import Sink
from training.state import TrainState

logger = logging.getLogger(__name__)

COMPARED = ("loss", "grad_norm")


class ReplaySpec(Part):
    """Which step of which run."""

    storage_root: str = Field(description="URL of the store")
    run_id: str = Field(description="the run")
    step: PositiveInt = Field(description="the last step to do again")


@dataclass
class Replayed:
    """What came out."""

    start: int
    """The step that the replay started from; 0 for the initial weights."""
    steps: list[dict[str, Any]] = field(default_factory=list)
    """For each step: `step`, `first_sample` (position), `loss`, `grad_norm`, `logged_loss`, `logged_grad_norm`."""

    @property
    def largest_difference(self) -> float | None:
        """Largest relative difference to what was logged; None when nothing was."""
        pairs = [(step[name], step[f"logged_{name}"]) for step in self.steps for name in COMPARED]
        differences = [abs(now - then) / max(abs(then), 1e-30) for now, then in pairs if then is not None]
        return max(differences, default=None)

    def document(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {"start": self.start, "steps": self.steps, "largest_difference": self.largest_difference}


def replay(spec: ReplaySpec, on_step: Callable[[int], None] = lambda _: None) -> Replayed:
    """Do the steps up to `spec.step` again. Raises InputError for a step that the run never made."""
    storage = Storage.open(spec.storage_root)
    run = RunSpec.model_validate(storage.read_json(f"runs/{spec.run_id}/artifacts/run.json"))
    logged = logged_steps(storage, run.run_prefix)
    if spec.step not in logged:
        reached = f"it reached step {max(logged)}" if logged else "it made none yet"
        raise InputError(f"The run {run.name} ({run.run_id}) has no step {spec.step}: {reached}.")
    world = World(0, 1, detect_device(run.layout.device))
    training, start = assemble(run, storage, world, spec.step, on_step)
    assert isinstance(training.sink, _Steps)
    train(training)
    steps = [
        {
            "step": event["step"],
            "first_sample": event["position"],
            **{name: event[name] for name in COMPARED},
            **{f"logged_{name}": logged.get(event["step"], {}).get(name) for name in COMPARED},
        }
        for event in training.sink.kept
    ]
    return Replayed(start, steps)


def logged_steps(storage: Storage, run_prefix: str) -> dict[int, dict[str, Any]]:
    """The event of every step that the attempt chain covers, by step."""
    steps = {}
    for link in reversed(chain(read_attempts(storage, run_prefix))):
        for event in read_events(storage, run_prefix, link.attempt):
            if event["kind"] == "step" and link.covers(event["step"]):
                steps[event["step"]] = event
    return steps


def assemble(
    run: RunSpec, storage: Storage, world: World, last: int, on_step: Callable[[int], None]
) -> tuple[Training, int]:
    """Everything for the loop, filled from before the step, and the step that it starts from."""
    seed_rank(run.seed, world.rank)
    engine = Engine.build(run.model, world, precision=run.training.precision, seed=run.seed)
    optimizer = build_adamw(engine.parameters.values(), run.optimizer)
    schedule = Schedule.of(run.schedule, peak=run.optimizer.learning_rate, steps=run.training.steps)
    state = TrainState(engine.parameters, optimizer, schedule, world.rank)
    checkpoint = _load(storage, run, state, before=last)
    if checkpoint is None and run.training.init_from is not None:
        load_weights(engine.parameters, read_origin(storage, run.training.init_from, run.model).weights)
    attempts = read_attempts(storage, run.run_prefix)
    batches: Batches = open_batches(run, open_run_dataset(run, storage), world)
    training = Training(
        # The loop ends by being asked to, so that the schedule stays that of the whole run.
        run=run.model_copy(update={"layout": _divided_as(attempts[-1], run)}),
        engine=engine,
        state=state,
        batches=batches,
        evaluate=_no_evaluation,
        checkpoints=_NoCheckpoints(),
        sink=_Steps(state, run.training.global_batch_size, on_step),
        should_stop=lambda: state.step >= last,
        skip=attempts[-1].skip,
    )
    return training, state.step


def _divided_as(attempt: AttemptRecord, run: RunSpec) -> LayoutConfig:
    """The layout of one process whose micro-batches are those of the ranks of an attempt."""
    rows = run.training.global_batch_size // int(attempt.layout["world_size"])
    size = min(int(attempt.layout["micro_batch_size"]), rows)
    return run.layout.model_copy(update={"micro_batch_size": size})


def _load(storage: Storage, run: RunSpec, state: TrainState, *, before: int) -> Checkpoint | None:
    """Fill the state from the newest checkpoint before the step whose every byte verifies; None when there is none."""
    for checkpoint in list_commits(storage, run.run_prefix):
        if checkpoint.step >= before:
            continue
        require_same_run(run, checkpoint)
        try:
            tensors = read_tensors(storage, checkpoint.prefix, checkpoint.commit)
        except DamagedData as error:
            logger.warning("The checkpoint of step %d is passed by: %s", checkpoint.step, error)
            continue
        state.load_state_dict({"tensors": tensors, "values": checkpoint.commit.body["state"]})
        return checkpoint
    return None


class _Steps(Sink):
    """Keeps the events of the steps, with the position at which each began."""

    def __init__(self, state: TrainState, batch_size: int, on_step: Callable[[int], None]) -> None:
        super().__init__()
        self._state, self._batch_size, self._on_step = state, batch_size, on_step
        self.kept: list[dict[str, Any]] = []

    def event(self, kind: str, **fields: Any) -> None:
        if kind == "step":
            self.kept.append({**fields, "position": self._state.position - self._batch_size})
            self._on_step(fields["step"])


class _NoCheckpoints:
    """Saves nothing: a replay leaves the run as it is."""

    def save_async(self, state: TrainState, *, required: bool = False) -> bool:  # noqa: ARG002 - the interface
        return False

    def poll(self) -> int | None:
        return None

    def wait(self) -> int | None:
        return None

    def load(self, state: TrainState, restore: RestorePoint) -> None:
        raise NotImplementedError


def _no_evaluation() -> EvalResult:
    return EvalResult(0.0, 1.0, 0.0, 0.0, 0, 0, [], [], [])


def main() -> None:
    """Entry point."""
    run_program(ReplaySpec, "a replay", lambda spec: replay(spec, lambda step: say({"step": step})).document())


if __name__ == "__main__":
    main()
