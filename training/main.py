"""One rank of one attempt: read the attempt's file, build, train, and leave with a meaning.

    torchrun --standalone --nproc-per-node 2 -m training.main <work_dir>/attempt.json

Each rank leaves `result-rank-N.json` and then the process by `os._exit`: a crash while libraries are torn down, after
the last step was committed, is not a failure. Exit codes: 0 finished, 1 failed, 2 config or refused input, 3 stopped
and resumable.
"""

import functools
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import NoReturn

import torch

from data_prep.dataset import Dataset, open_dataset
from data_prep.order import SampleOrder
from headrace import faults
from headrace.environment import work_path
from headrace.errors import ConfigError, DamagedData, HeadraceError, InputError
from headrace.events import EventWriter
from headrace.patience import patiently
from headrace.process import set_parent_death_signal
from headrace.storage import Storage
from training.batches import Batches, num_samples
from training.checkpoint.checkpointer import AsyncCheckpointer
from training.evaluation.evaluate import evaluate
from training.evaluation.spec import EvalSpec
from training.health.rewind import RewindRequest, write_rewind
from training.launch.stacks import offer_stacks
from training.loop import Outcome, Training, train
from training.model.init import load_weights
from training.optim.adamw import build_adamw
from training.optim.schedule import Schedule
from training.origin import read_origin
from training.parallel.engine import Engine
from training.parallel.world import World, join_world, keep_freed_memory
from training.rng import seed_rank
from training.run_spec import AttemptSpec, RankResult, RunSpec, read_attempt
from training.sink import Sink
from training.state import TrainState
from training.torchrun import PID_VARIABLE

logger = logging.getLogger(__name__)

ECHOES = ("Connection closed by peer", "Connection reset by peer", "NCCL communicator was aborted")
EXIT_CODES = {"finished": 0, "stopped": 3}


def main() -> NoReturn:
    """Entry point of a rank."""
    # First of all: a rank whose torchrun is gone must not go on to write beside the next attempt's ranks. It may have
    # gone while this process was still loading torch.
    torchrun_pid = os.environ.get(PID_VARIABLE)
    set_parent_death_signal(signal.SIGKILL, int(torchrun_pid) if torchrun_pid else None)
    rank = int(os.environ.get("RANK", "0"))
    form = f"%(asctime)s rank {rank} %(levelname)s %(name)s: %(message)s"
    logging.basicConfig(level=logging.INFO, format=form, stream=sys.stderr)
    faults.register(f"rank:{rank}")
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    spec = read_attempt(Path(sys.argv[1]))
    offer_stacks(spec, rank)
    result = run_rank(spec, rank, stop)
    leave(spec, result)


def run_rank(spec: AttemptSpec, rank: int, stop: threading.Event) -> RankResult:
    """Train as one rank and say how it ended, whatever happens."""
    sink = Sink(
        rank=rank,
        heartbeat=spec.heartbeat_path(rank),
        events=EventWriter(spec.events_path, spec.attempt) if rank == 0 else None,
    )
    try:
        outcome = _train(spec, sink, stop)
    except BaseException as error:
        # Whatever it is (torch's checkpoint errors are no Exceptions), the launcher must read why this rank ended.
        logger.exception("Rank %d failed after step %d.", rank, sink.step)
        return RankResult(
            rank=rank,
            outcome="failed",
            step=sink.step,
            exit_code=error.exit_code if isinstance(error, HeadraceError) else 1,
            error_kind=type(error).__name__,
            message=str(error) or repr(error),
            retryable=error.retryable if isinstance(error, HeadraceError) else None,
            secondary=is_echo(error),
            time=time.time(),
        )
    return RankResult(rank=rank, outcome=outcome, step=sink.step, exit_code=EXIT_CODES[outcome], time=time.time())


def _train(spec: AttemptSpec, sink: Sink, stop: threading.Event) -> Outcome:
    sink.phase("start")
    keep_freed_memory()
    set_threads(spec.run)
    storage = Storage.open(spec.storage_root)
    world = join_world(spec.run.layout, timeout_seconds=3 * spec.run.launch.hang_timeout_seconds)
    tell_start(spec, world, sink)
    training = assemble(spec, storage, world, sink, stop)
    outcome = train(training)
    if sink.events is not None:
        sink.events.publish(storage, spec.run.run_prefix)
    sink.phase(outcome, step=training.state.step)
    return outcome


def is_echo(error: BaseException) -> bool:
    """Whether the error is what a healthy rank sees when another one is gone: a connection that was closed."""
    text = str(error)
    return isinstance(error, RuntimeError) and any(sign in text for sign in ECHOES)


def leave(spec: AttemptSpec, result: RankResult) -> NoReturn:
    """Write the result, then end the process at once, without any library's teardown."""
    path = spec.result_path(result.rank)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(result.model_dump_json(indent=2), encoding="utf-8")
    temporary.replace(path)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(result.exit_code)


def set_threads(run: RunSpec) -> None:
    """Share the cores between the ranks of this machine; torchrun would give each rank one thread."""
    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(run.launch.threads_per_rank or max(1, cores // run.launch.ranks_per_node))


def tell_start(spec: AttemptSpec, world: World, sink: Sink) -> None:
    """The first event of the attempt: from where it goes on, and on what."""
    sink.event(
        "attempt.started",
        step=spec.restore.step if spec.restore else 0,
        restore=spec.restore.model_dump() if spec.restore else None,
        world_size=world.world_size,
        device=str(world.device),
        precision=spec.run.training.precision,
        parameters=spec.run.model.num_parameters,
        threads_per_rank=torch.get_num_threads(),
    )


def assemble(spec: AttemptSpec, storage: Storage, world: World, sink: Sink, stop: threading.Event) -> Training:
    """Build everything that the loop works with, and fill it from the checkpoint or from the initial weights."""
    run = spec.run
    dataset = open_run_dataset(run, storage)
    batches = open_batches(run, dataset, world)
    seed_rank(run.seed, world.rank)
    engine = Engine.build(run.model, world, precision=run.training.precision, seed=run.seed)
    optimizer = build_adamw(engine.parameters.values(), run.optimizer)
    schedule = Schedule.of(run.schedule, peak=run.optimizer.learning_rate, steps=run.training.steps)
    state = TrainState(engine.parameters, optimizer, schedule, world.rank)
    checkpoints = AsyncCheckpointer(storage, spec, events=sink.events)
    if spec.restore is not None:
        checkpoints.load(state, spec.restore)
    elif run.training.init_from is not None:
        origin = read_origin(storage, run.training.init_from, run.model)
        load_weights(engine.parameters, origin.weights)
        sink.event("weights.loaded", step=0, init_from=run.training.init_from, **origin.record)
    score = functools.partial(
        evaluate,
        engine.infer,
        dataset.stream("validation", cache_path()),
        EvalSpec.of(
            run.evaluation,
            dataset_digest=run.dataset_digest,
            tokenizer_digest=run.tokenizer_digest,
            window=run.training.seq_len,
            precision=run.training.precision,
        ),
        dataset.token_bytes(),
        world=world,
        batch_size=run.evaluation.batch_size,
        on_progress=lambda *_: sink.phase("evaluate"),
    )

    def ask_rewind(request: RewindRequest) -> None:
        until = time.monotonic() + run.checkpoint.save_timeout_seconds
        patiently(lambda: write_rewind(storage, run.run_prefix, request), until)

    return Training(
        run,
        engine,
        state,
        batches,
        score,
        checkpoints,
        sink,
        stop.is_set,
        attempt=spec.attempt,
        skip=spec.skip,
        ask_rewind=ask_rewind,
    )


def open_run_dataset(run: RunSpec, storage: Storage) -> Dataset:
    """The dataset that the run was made for. Raises DamagedData for another, ConfigError when its tokens do not fit."""
    dataset = open_dataset(storage, run.dataset_key)
    if dataset.digest != run.dataset_digest:
        raise DamagedData(
            f"The dataset {run.dataset_key} has the digest {dataset.digest}, but the run was made for "
            f"{run.dataset_digest}."
        )
    if dataset.vocab_size > run.model.vocab_size:
        raise ConfigError(
            f"The dataset's tokenizer has {dataset.vocab_size} tokens, but model.vocab_size is {run.model.vocab_size}; "
            f"set it to {dataset.vocab_size} or more."
        )
    return dataset


def open_batches(run: RunSpec, dataset: Dataset, world: World) -> Batches:
    """This rank's batches. Raises InputError when the train split is shorter than one sequence."""
    tokens = dataset.stream("train", cache_path())
    samples = num_samples(len(tokens), run.training.seq_len)
    if samples == 0:
        raise InputError(
            f"The train split of {run.dataset_key} holds {len(tokens)} tokens, fewer than one sequence of "
            f"training.seq_len {run.training.seq_len} and its last target. Add text or lower training.seq_len."
        )
    return Batches(
        tokens,
        SampleOrder(run.dataset_digest, run.seed, samples),
        seq_len=run.training.seq_len,
        global_batch_size=run.training.global_batch_size,
        dp_rank=world.dp_rank,
        dp=world.dp,
    )


def cache_path() -> Path:
    """Where copies of shards lie when the store is not a folder; shared by all runs of this machine."""
    return work_path() / "cache"


if __name__ == "__main__":
    main()
