"""From raw text to a registered model: prepare, train, export, evaluate, register.

    prepare   text                -> dataset       datasets/<name>-<fingerprint>/manifest.json
    train     dataset, identity   -> checkpoint    runs/<run id>/artifacts/checkpoints/…
    export    checkpoint          -> model files   runs/models/<model id>/artifacts/
    evaluate  model files, spec   -> result        runs/<run id>/artifacts/evaluations/<digest>/
    register  model files, result -> version       in MLflow's registry, alias `champion` when better

Every stage finds its own commit first, so a flow may be ended anywhere and started again; and a flow that ends with an
earlier stage is the same way, left earlier: what it made is found by the next one.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, TypeVar

from prefect.exceptions import TerminationSignal
from prefect.runtime import deployment
from prefect.states import Cancelled as PrefectCancelled
from prefect.states import Crashed as PrefectCrashed

from data_prep.dataset import PrepareResult
from flows.config import PipelineConfig, require_vocabulary, store_root
from flows.presence import present, works_on
from flows.report import publish, show_pages
from flows.result import PretrainResult, Scores, StageResult, StagesResult
from headrace import faults
from headrace.config import identity_document
from headrace.environment import home, work_path
from headrace.errors import Cancelled, HeadraceError, InputError, Preempted
from headrace.lease import LeaseHolder, hold
from headrace.storage import Storage
from headrace.tracking import Status, Tracker
from tasks import prepare as prepare_stage
from tasks.console import terminal
from tasks.curve import loss_curve
from tasks.evaluate import EvaluateResult, evaluate
from tasks.export import ExportResult, export
from tasks.prepare import prepare
from tasks.record import complete_run, open_run
from tasks.register import RegisterResult, register
from tasks.runs import DatasetRef, Run, RunRequest, Workspace, lease_key
from tasks.shown import live_page, reap, untrained_bits_per_byte
from tasks.stopping import is_cancelled_in_prefect
from tasks.train import TrainingSession, TrainResult, train

Stage = Literal["prepare", "train", "evaluate", "register"]
"""What a flow may end with."""

Result = TypeVar("Result", PretrainResult, StagesResult)


def whole_way(config: PipelineConfig) -> PretrainResult:
    """All stages, as the body of a flow."""
    return _or_cancelled(lambda: _published(config, "register", summarise))


def part_way(config: PipelineConfig, until: Stage) -> StagesResult:
    """The stages up to `until`, as the body of a flow."""
    return _or_cancelled(lambda: _published(config, until, lambda made: summarise_part(made, config)))


def _published(config: PipelineConfig, until: Stage, summary: Callable[["Made"], Result]) -> Result:
    made = run_stages(config, until)
    result = summary(made)
    publish(result, loss_curve(made.space.storage, made.run.spec.run_prefix) if made.run else [])
    return result


def _or_cancelled(stages: Callable[[], Result]) -> Result:
    """The result, or the state of a run that was asked to stop.

    Who cancels a run wants it to end, so nothing starts it again. A worker that is stopped takes its runs with it;
    those only make room, and are continued.
    """
    try:
        return stages()
    except Cancelled as stopped:
        makes_room = deployment.id is not None and not is_cancelled_in_prefect()
        state = PrefectCrashed if makes_room else PrefectCancelled
        return state(message=str(stopped))  # type: ignore[return-value] # Prefect takes it as the state


def run_stages(config: PipelineConfig, until: Stage = "register") -> "Made":
    """The stages in order, ending with `until`."""
    faults.register("flow")
    clock = StageClock()
    space = open_workspace(config)
    with present(space.storage):
        reap(space, config.tracking.experiment)
        clock.lap()
        prepared = prepare(space, config.data, config.tokenizer)
        clock.lap("prepare", prepared.units_built == 0, prepare_stage.summary(prepared))
        made = Made(space, clock, prepared)
        if until != "prepare":
            require_fit(config, prepared)
            _work_on_run(config, made, until)
    return made


def _work_on_run(config: PipelineConfig, made: "Made", until: Stage) -> None:
    """Find or make the run that the config names on this dataset, and take it as far as `until`."""
    space, prepared = made.space, made.prepared
    dataset = DatasetRef(prepared.dataset_key, prepared.digest, prepared.tokenizer_digest)
    made.run = run = open_run(space, run_request(config), dataset)
    works_on(space.storage, run.run_id)
    show_pages(made.pages)
    if run.related:
        terminal().note(run.related)
    with only_command_of(space, run), true_status(space, run):
        _train_to_register(config, made, run, until)
        complete_run(space, run)


def _train_to_register(config: PipelineConfig, made: "Made", run: Run, until: Stage) -> None:
    space, clock = made.space, made.clock
    made.training = training = train(space, run, TrainingSession())
    clock.lap("train", training.reused, f"step {training.step}")
    if until == "train":
        return
    made.exported = exported = export(space, run, training, config.registration.dtype)
    clock.lap("export", exported.reused, space.storage.url(exported.prefix))
    made.evaluated = evaluated = evaluate(space, run, exported)
    clock.lap("evaluate", evaluated.scored.reused, f"loss {evaluated.scored.summary['loss']:.4f}")
    if until == "evaluate":
        return
    made.registered = registered = register(space, run, exported, evaluated, config.registered_name, config.data)
    clock.lap("register", registered.reused, f"{registered.name} version {registered.version}")


def open_workspace(config: PipelineConfig) -> Workspace:
    """The store and the tracking store, both asked once before anything starts."""
    storage = Storage.open(store_root(config, home()))
    storage.probe_create_only()
    return Workspace(storage, Tracker.connect(), work_path())


def require_fit(config: PipelineConfig, prepared: PrepareResult) -> None:
    """Refuse a dataset that this model cannot be trained on, before a run is made."""
    require_vocabulary(config, prepared.vocab_size)
    tokens = prepared.counts.splits["train"].tokens
    if tokens <= config.training.seq_len:
        raise InputError(
            f"The training split has {tokens:,} tokens, but one sequence needs training.seq_len + 1 = "
            f"{config.training.seq_len + 1:,}. Give more text or lower training.seq_len."
        )


def run_request(config: PipelineConfig) -> RunRequest:
    """What the stages after `prepare` get of the config."""
    return RunRequest(
        name=config.name,
        seed=config.seed,
        experiment=config.tracking.experiment,
        identity=identity_document(config),
        model=config.model,
        training=config.training,
        optimizer=config.optimizer,
        schedule=config.schedule,
        evaluation=config.evaluation,
        checkpoint=config.checkpoint,
        layout=config.layout,
        launch=config.launch,
        stability=config.stability,
    )


class StageClock:
    """How long each stage took, in the order in which they ended."""

    def __init__(self) -> None:
        self.started = self._last = time.monotonic()
        self.stages: list[StageResult] = []

    def lap(self, name: str = "", reused: bool = False, detail: str = "") -> None:
        """Note the end of a stage, or of something that is none."""
        now = time.monotonic()
        seconds = round(now - self._last, 3)
        self._last = now
        if name:
            outcome: Literal["done", "reused"] = "reused" if reused else "done"
            self.stages.append(StageResult(name=name, outcome=outcome, seconds=seconds, detail=detail))


@dataclass
class Made:
    """What the stages of one flow came back with; None for those that were not asked for."""

    space: Workspace
    clock: StageClock
    prepared: PrepareResult
    run: Run | None = None
    training: TrainResult | None = None
    exported: ExportResult | None = None
    evaluated: EvaluateResult | None = None
    registered: RegisterResult | None = None

    @property
    def seconds(self) -> float:
        """Seconds since the flow began."""
        return round(time.monotonic() - self.clock.started, 3)

    @property
    def pages(self) -> dict[str, str]:
        """Pages of servers that answer."""
        page = live_page(self.space, self.run) if self.run else None
        return {"MLflow": page} if page else {}


def summarise(made: Made) -> PretrainResult:
    """Put together what all stages came back with."""
    run, training, exported = made.run, made.training, made.exported
    evaluated, registered = made.evaluated, made.registered
    assert run, "the whole way makes a run"
    assert training, "the whole way trains it"
    assert exported, "the whole way exports it"
    assert evaluated, "the whole way scores it"
    assert registered, "the whole way registers it"
    scored = evaluated.scored
    return PretrainResult(
        run_id=run.run_id,
        run_key=run.spec.run_key,
        name=run.spec.name,
        dataset=run.spec.dataset_key,
        step=training.step,
        attempts=training.attempts,
        stages=tuple(made.clock.stages),
        bits_per_byte=Scores(
            model=scored.bits_per_byte,
            untrained=untrained_bits_per_byte(made.space.storage, run.spec.run_prefix),
            unigram=scored.baselines["unigram_bits_per_byte"],
            bigram=scored.baselines["bigram_bits_per_byte"],
        ),
        evaluation={**scored.summary, "digest": evaluated.digest},
        model_name=registered.name,
        version=registered.version,
        new_version=registered.new_version,
        champion=registered.champion,
        verdict=registered.verdict,
        export=made.space.storage.url(exported.prefix),
        seconds=made.seconds,
        pages=made.pages,
    )


def summarise_part(made: Made, config: PipelineConfig) -> StagesResult:
    """Put together what the stages came back with, when registration was not asked for."""
    run, training, exported, evaluated = made.run, made.training, made.exported, made.evaluated
    return StagesResult(
        name=config.name,
        dataset=made.prepared.dataset_key,
        run_id=run.run_id if run else None,
        step=training.step if training else None,
        attempts=training.attempts if training else None,
        export=made.space.storage.url(exported.prefix) if exported else None,
        bits_per_byte=evaluated.bits_per_byte if evaluated else None,
        stages=tuple(made.clock.stages),
        seconds=made.seconds,
        pages=made.pages,
    )


@contextmanager
def only_command_of(space: Workspace, run: Run) -> Iterator[None]:
    """One command at a time works on a run: a second one waits, then finds everything done."""

    def say(holder: LeaseHolder) -> None:
        terminal().note(f"Process {holder.pid} on {holder.host} works on this run; waiting for it.")

    with hold(space.storage, lease_key(run.run_id), on_wait=say):
        yield


@contextmanager
def true_status(space: Workspace, run: Run) -> Iterator[None]:
    """Say in MLflow what is true of the run: RUNNING within the block, then how the block was left.

    A run that was FINISHED stays so while nothing fails: what is added to it later is not its training.
    """
    finished = space.tracker.get_run(run.run_id).status == "FINISHED"
    if not finished:
        space.tracker.set_status(run.run_id, "RUNNING")
    ending: Status = "FAILED"
    try:
        yield
        ending = "FINISHED"
    except (KeyboardInterrupt, TerminationSignal, Cancelled, Preempted):
        ending = "KILLED"
        raise
    finally:
        if not (finished and ending == "FINISHED"):
            _tell(space, run, ending)


def _tell(space: Workspace, run: Run, status: Status) -> None:
    try:
        space.tracker.set_status(run.run_id, status)
    except HeadraceError:
        terminal().note(f"MLflow does not answer, so the run {run.run_id} is not shown as {status} there.")
