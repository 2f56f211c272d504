"""From raw text to a registered model: prepare, train, export, evaluate, register.

    prepare   text                -> dataset       datasets/<name>-<fingerprint>/manifest.json
    train     dataset, identity   -> checkpoint    runs/<run id>/artifacts/checkpoints/…
    export    checkpoint          -> model files   runs/models/<model id>/artifacts/
    evaluate  model files, spec   -> result        runs/<run id>/artifacts/evaluations/<digest>/
    register  model files, result -> version       in MLflow's registry, alias `champion` when better

Every stage finds its own commit first, so the flow may be ended anywhere and started again.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from prefect import flow
from prefect.exceptions import TerminationSignal

from data_prep.dataset import PrepareResult
from flows.config import PipelineConfig, store_root
from flows.result import PretrainResult, StageResult
from headrace import faults
from headrace.config import identity_document
from headrace.environment import home, work_path
from headrace.errors import Cancelled, ConfigError, HeadraceError, InputError, Preempted
from headrace.storage import Storage
from headrace.tracking import Status, Tracker
from tasks.console import terminal
from tasks.prepare import prepare
from tasks.runs import DatasetRef, Run, RunRequest, Workspace, resolve_run
from tasks.shown import announce, bring_up_to_date
from tasks.train import TrainingSession, train


@flow(name="pretrain", persist_result=False)
def pretrain(config: PipelineConfig) -> PretrainResult:
    """Turn the config's text into a registered, evaluated model; whatever is committed already is reused."""
    faults.register("flow")
    started = time.monotonic()
    space = open_workspace(config)
    prepared = prepare(space, config.data, config.tokenizer)
    dataset = DatasetRef(prepared.dataset_key, prepared.digest, prepared.tokenizer_digest)
    require_fit(config, prepared)

    request = run_request(config)
    run = resolve_run(space, request, dataset)
    if run.related:
        terminal().note(run.related)
    with true_status(space, run):
        announce(space, run, request, dataset)
        training = train(space, run, TrainingSession())
        bring_up_to_date(space, run)
    raise HeadraceError(f"{training} {started} {StageResult}")


def open_workspace(config: PipelineConfig) -> Workspace:
    """The store and the tracking store, both asked once before anything starts."""
    storage = Storage.open(store_root(config, home()))
    storage.probe_create_only()
    return Workspace(storage, Tracker.connect(), work_path())


def require_fit(config: PipelineConfig, prepared: PrepareResult) -> None:
    """Refuse a dataset that this model cannot be trained on, before a run is made."""
    if prepared.vocab_size > config.model.vocab_size:
        raise ConfigError(
            f"The tokenizer has {prepared.vocab_size} tokens, but model.vocab_size is {config.model.vocab_size}; set "
            f"model.vocab_size to {prepared.vocab_size} or more."
        )
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
    )


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
