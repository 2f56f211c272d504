# ruff: noqa: D101, D102, ARG002 - stand-ins and the hand-written peer are read through the docstring below
"""The training loop, with its loader, events and heartbeats on, against a bare loop of the same model.

    python benchmarks/bench_engine.py [--precision float32|bfloat16] [--rounds 12]

The bare loop is what one writes by hand: fused AdamW, scaled-dot-product attention, nothing read, nothing told. Both
run in this process and take turns, a few steps each, so other work on the machine hits both alike; the ratio is the
median over the rounds. In bfloat16 the bare loop is the faster of autocast and bfloat16 weights with a float32 master.
Then two ranks of one thread each are measured alone (FSDP2 over gloo).
"""

import argparse
import functools
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.multiprocessing as multiprocessing
from torch import Tensor, nn
from torch.nn import functional as F

from data_prep.order import SampleOrder
from headrace.events import EventWriter
from training.batches import Batches, Int64s, num_samples
from training.checkpoint.config import CheckpointConfig
from training.config import TrainingConfig
from training.evaluation.config import EvaluationConfig
from training.evaluation.evaluate import EvalResult
from training.launch.config import LaunchConfig
from training.loop import Training, train
from training.model.config import ModelConfig
from training.optim.adamw import build_adamw
from training.optim.config import OptimizerConfig, ScheduleConfig
from training.optim.schedule import Schedule
from training.parallel.config import LayoutConfig
from training.parallel.engine import Engine
from training.parallel.world import World, join_world, keep_freed_memory
from training.run_spec import RestorePoint, RunSpec
from training.sink import Sink
from training.state import TrainState

MODEL = ModelConfig()
GLOBAL_BATCH, SEQ_LEN, MICRO_BATCH = 16, 256, 8
STEPS_A_TURN = 2


class RandomTokens:
    """A split in memory."""

    def __init__(self) -> None:
        self._tokens = np.random.default_rng(0).integers(0, MODEL.vocab_size, 2**21)

    def __len__(self) -> int:
        return len(self._tokens)

    def read_many(self, starts: Int64s, length: int) -> Int64s:
        return self._tokens[starts[:, None] + np.arange(length)]


class NoCheckpoints:
    """Saves are measured elsewhere."""

    def save_async(self, state: TrainState, *, required: bool = False) -> bool:
        return True

    def poll(self) -> int | None:
        return None

    def wait(self) -> int | None:
        return None

    def load(self, state: TrainState, restore: RestorePoint) -> None:
        raise NotImplementedError


class Turns:
    """Asks the loop to stop after a number of steps."""

    left = 0

    def should_stop(self) -> bool:
        self.left -= 1
        return self.left < 0


def engine_loop(world: World, precision: str, folder: Path) -> Callable[[], None]:
    """A turn of our loop, everything on but saves and evaluations."""
    run = RunSpec(
        run_id="0" * 32,
        run_key="benchmark",
        name="benchmark",
        seed=0,
        model=MODEL,
        training=TrainingConfig.model_validate(
            {"steps": 10**6, "global_batch_size": GLOBAL_BATCH, "seq_len": SEQ_LEN, "precision": precision}
        ),
        optimizer=OptimizerConfig(),
        schedule=ScheduleConfig(),
        dataset_key="none",
        dataset_digest="none",
        tokenizer_digest="none",
        evaluation=EvaluationConfig(every=10**6),
        checkpoint=CheckpointConfig(save_every=10**6),
        layout=LayoutConfig(micro_batch_size=MICRO_BATCH),
        launch=LaunchConfig(),
    )
    tokens = RandomTokens()
    order = SampleOrder("none", 0, num_samples(len(tokens), SEQ_LEN))
    batches = Batches(
        tokens, order, seq_len=SEQ_LEN, global_batch_size=GLOBAL_BATCH, dp_rank=world.dp_rank, dp=world.dp
    )
    engine = Engine.build(MODEL, world, precision=precision, seed=0)
    optimizer = build_adamw(engine.parameters.values(), run.optimizer)
    schedule = Schedule.of(run.schedule, peak=run.optimizer.learning_rate, steps=run.training.steps)
    state = TrainState(engine.parameters, optimizer, schedule, world.rank)
    events = EventWriter(folder / "events.jsonl", 1) if world.rank == 0 else None
    sink = Sink(rank=world.rank, heartbeat=folder / "heartbeats" / f"{world.rank}.json", events=events)
    turns = Turns()
    nothing = EvalResult(0.0, 1.0, 0.0, 0.0, 0, 0, [], [], [])
    training = Training(run, engine, state, batches, lambda: nothing, NoCheckpoints(), sink, turns.should_stop)

    def turn() -> None:
        turns.left = STEPS_A_TURN
        train(training)

    return turn


# ------------------------------------------------------------------------------------------------- the bare loop


class BareBlock(nn.Module):
    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        kv = c.num_kv_heads * c.head_dim
        self.c = c
        self.norm1, self.norm2 = nn.RMSNorm(c.dim, c.norm_eps), nn.RMSNorm(c.dim, c.norm_eps)
        self.q, self.o = nn.Linear(c.dim, c.dim, bias=False), nn.Linear(c.dim, c.dim, bias=False)
        self.k, self.v = nn.Linear(c.dim, kv, bias=False), nn.Linear(c.dim, kv, bias=False)
        self.gate, self.up = nn.Linear(c.dim, c.ffn_dim, bias=False), nn.Linear(c.dim, c.ffn_dim, bias=False)
        self.down = nn.Linear(c.ffn_dim, c.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        h = self.norm1(x)
        q, k, v = (part.view(batch, length, -1, self.c.head_dim).transpose(1, 2) for part in self._qkv(h))
        q, k = turned(q, cos, sin), turned(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(y.transpose(1, 2).reshape(batch, length, -1))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))

    def _qkv(self, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.q(h), self.k(h), self.v(h)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Bare(nn.Module):
    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.embed = nn.Embedding(c.vocab_size, c.dim)
        self.blocks = nn.ModuleList(BareBlock(c) for _ in range(c.num_layers))
        self.norm = nn.RMSNorm(c.dim, c.norm_eps)
        self.head = nn.Linear(c.dim, c.vocab_size, bias=False)
        if c.tie_embeddings:
            self.head.weight = self.embed.weight
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)
        angles = torch.outer(torch.arange(SEQ_LEN), 1.0 / c.rope_theta ** (torch.arange(0, c.head_dim, 2) / c.head_dim))
        self.angles = angles.repeat(1, 2)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        cos, sin = self.angles.cos().to(x.dtype), self.angles.sin().to(x.dtype)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))


def bare_loop(variant: str) -> Callable[[], None]:
    """A turn of the bare loop: `float32`, `autocast`, or `master` (bfloat16 weights with a float32 master)."""
    torch.manual_seed(0)
    model = Bare(MODEL)
    masters = list(model.parameters())
    if variant == "master":
        masters = [nn.Parameter(parameter.detach().clone()) for parameter in model.parameters()]
        model = model.bfloat16()
    optimizer = torch.optim.AdamW(masters, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    ids = torch.randint(0, MODEL.vocab_size, (GLOBAL_BATCH, SEQ_LEN + 1))

    def step() -> None:
        for rows in ids.split(MICRO_BATCH):
            with torch.autocast("cpu", torch.bfloat16, enabled=variant == "autocast"):
                logits = model(rows[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten(), reduction="sum") / ids.numel()
            loss.backward()
        if variant == "master":
            for master, copy in zip(masters, model.parameters(), strict=True):
                master.grad, copy.grad = copy.grad.float(), None
        nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if variant == "master":
            with torch.no_grad():
                torch._foreach_copy_(list(model.parameters()), masters)

    def turn() -> None:
        for _ in range(STEPS_A_TURN):
            step()

    return turn


# ----------------------------------------------------------------------------------------------------- measuring


@dataclass(frozen=True)
class Taken:
    """Wall time, and CPU time of this process: the second hardly moves when others use the cores too."""

    wall: float
    cpu: float


def measure(turn: Callable[[], None]) -> Taken:
    wall, cpu = time.perf_counter(), time.process_time()
    turn()
    return Taken(time.perf_counter() - wall, time.process_time() - cpu)


def medians(turns: list[Taken]) -> Taken:
    return Taken(statistics.median(turn.wall for turn in turns), statistics.median(turn.cpu for turn in turns))


def tokens_per_second(turn_seconds: float) -> float:
    return STEPS_A_TURN * GLOBAL_BATCH * SEQ_LEN / turn_seconds


def compare(precision: str, rounds: int) -> None:
    variants = {"float32": ["float32"], "bfloat16": ["autocast", "master"]}[precision]
    with tempfile.TemporaryDirectory() as folder:
        ours = engine_loop(World(0, 1, torch.device("cpu")), precision, Path(folder))
        bare = {name: bare_loop(name) for name in variants}
        for turn in (ours, *bare.values()):
            turn()  # first steps make caches
        taken: dict[str, list[Taken]] = {name: [] for name in ("engine", *bare)}
        for _ in range(rounds):
            taken["engine"].append(measure(ours))
            for name, turn in bare.items():
                taken[name].append(measure(turn))
    print(f"{'loop':<12}{'tok/s (median)':>16}{'best':>8}{'tok/CPU s':>12}")
    for name, turns in taken.items():
        median, best_wall = medians(turns), min(turn.wall for turn in turns)
        rates = [tokens_per_second(seconds) for seconds in (median.wall, best_wall, median.cpu)]
        print(f"{name:<12}{rates[0]:>16.0f}{rates[1]:>8.0f}{rates[2]:>12.0f}")
    fastest = min(bare, key=lambda name: medians(taken[name]).cpu)
    pairs = list(zip(taken[fastest], taken["engine"], strict=True))
    wall = statistics.median(bare_turn.wall / engine_turn.wall for bare_turn, engine_turn in pairs)
    cpu = statistics.median(bare_turn.cpu / engine_turn.cpu for bare_turn, engine_turn in pairs)
    print(f"engine / bare ({fastest}): {wall:.3f} by wall time, {cpu:.3f} by CPU time   wanted: at least 0.95")


def rank(number: int, ranks: int, precision: str, rounds: int, port: int, folder: str) -> None:
    os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": str(ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    keep_freed_memory()
    turn = engine_loop(join_world(LayoutConfig(device="cpu"), timeout_seconds=300), precision, Path(folder))
    turn()
    turns = [measure(turn) for _ in range(rounds)]
    if number == 0:
        median, best = medians(turns), min(turn.wall for turn in turns)
        print(
            f"{ranks} ranks of 1 thread: {tokens_per_second(median.wall):.0f} tok/s, "
            f"best {tokens_per_second(best):.0f}, "
            f"{tokens_per_second(median.cpu):.0f} per CPU second of one rank",
            flush=True,
        )
    os._exit(0)


def measure_ranks(ranks: int, precision: str, rounds: int) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        target = functools.partial(rank, ranks=ranks, precision=precision, rounds=rounds, port=port, folder=folder)
        context = multiprocessing.get_context("spawn")
        processes = [context.Process(target=target, args=(number,)) for number in range(ranks)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--precision", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    keep_freed_memory()  # for both loops alike
    print(
        f"torch {torch.__version__}, {arguments.threads} threads, {arguments.precision}, {MODEL.num_parameters:,} "
        f"parameters, batch {GLOBAL_BATCH} x {SEQ_LEN}, load {os.getloadavg()[0]:.1f}"
    )
    compare(arguments.precision, arguments.rounds)
    measure_ranks(2, arguments.precision, max(2, arguments.rounds // 3))


if __name__ == "__main__":
    main()
