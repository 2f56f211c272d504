"""A first config for a corpus and a machine: what `headrace init` writes.

The aim is a run that ends within minutes on two cores and within an hour on a GPU, and that learns something: enough
steps to see the text a few times, a vocabulary and a model that fit the amount of text. Everything can be changed.
"""

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import yaml

from data_prep.config import InputConfig
from data_prep.sources import SourceFile, discover
from headrace.config import NAME_MAX_LENGTH, NAME_PATTERN
from headrace.errors import InputError

T = TypeVar("T")

TEMPLATE = """\
# Written by `headrace init` for {files}, one document {documents} ({megabytes:,.2f} MB), sized to {machine}.
#
#   headrace validate FILE     headrace run FILE     headrace generate {name} --prompt "..."
#
# Every field is described in docs/guide.md; `headrace validate FILE --show` prints all of them with their values.

name: {quoted_name}                   # of the run and of the registered model
seed: 1

data:
  name: {quoted_name}
  inputs:
    - path: {quoted_data}      # a folder, a file or a glob; relative to where the command is given
      format: auto               # source and txt: one document a file; jsonl: one document a line
  on_error: skip                 # what cannot be read is left out and counted; fail stops at the first
  validation_fraction: 0.02      # held out by content; a small corpus gives a little more

tokenizer:
  vocab_size: {sizes.vocab_size}             # byte-level BPE, trained on this text once and kept; or set `path`

model:
  vocab_size: {sizes.vocab_size}             # not below the tokenizer's
  dim: {sizes.dim}
  num_layers: {sizes.num_layers}
  num_heads: {sizes.num_heads}
  num_kv_heads: {kv_heads}
  ffn_dim: {sizes.ffn_dim}
  max_seq_len: {sizes.seq_len}

training:                        # {million_tokens:,.2f} million tokens: about {passes:.1f} times through the text
  steps: {sizes.steps}
  global_batch_size: {sizes.global_batch_size}          # sequences in one step, over all ranks
  seq_len: {sizes.seq_len}
  precision: {sizes.precision}           # float32 on a CPU without instructions for bfloat16

optimizer:
  learning_rate: {sizes.learning_rate:.1e}

schedule:
  warmup_steps: {warmup}

launch:
  ranks_per_node: {sizes.ranks}              # processes; the result does not depend on it

layout:
  # sequences in one pass of one rank, {accumulate} in a step; lower it when memory is short
  micro_batch_size: {sizes.micro_batch_size}

checkpoint:
  save_every: {save}                 # steps between two saves; a killed run goes on from the last one

evaluation:
  every: {save}
  max_tokens: 65536              # of the validation split
  prompts: {prompts}
"""
"""What is written; comments stand where a reader changes something."""

BYTES_PER_TOKEN = 3.3
"""Of a small byte-level BPE on prose or code; only the order of magnitude matters."""

CPU_TOKENS = 1_000_000
"""What two cores train a model of four million parameters on in about two minutes."""

GPU_TOKENS = 200_000_000
MOST_EPOCHS = 12
GPU_FOLDER = Path("/proc/driver/nvidia/gpus")
CPU_FILE = Path("/proc/cpuinfo")
BFLOAT16_FLAGS = ("avx512_bf16", "amx_bf16", "bf16")
"""Instructions without which a CPU emulates bfloat16, about thirty times slower than float32."""


@dataclass(frozen=True)
class Machine:
    """What there is to compute with."""

    cores: int
    gpus: int
    bfloat16: bool = True
    """Whether it computes in bfloat16 by instructions of its own."""

    @classmethod
    def here(cls) -> "Machine":
        """This machine, asked without loading torch."""
        gpus = len(list(GPU_FOLDER.iterdir())) if GPU_FOLDER.is_dir() else 0
        return cls(len(os.sched_getaffinity(0)), gpus, bool(gpus) or _cpu_has(BFLOAT16_FLAGS))


@dataclass(frozen=True)
class Sizes:
    """The numbers of a first config."""

    vocab_size: int
    dim: int
    num_layers: int
    num_heads: int
    ffn_dim: int
    seq_len: int
    global_batch_size: int
    micro_batch_size: int
    ranks: int
    steps: int
    learning_rate: float
    precision: str

    @property
    def tokens(self) -> int:
        """Tokens of the whole run."""
        return self.steps * self.global_batch_size * self.seq_len


def choose_sizes(corpus_bytes: int, machine: Machine) -> Sizes:
    """Sizes for this much text on this machine."""
    tokens = max(1, int(corpus_bytes / BYTES_PER_TOKEN))
    vocab_size = _step(tokens, [(50_000, 512), (300_000, 1024), (1_500_000, 2048), (30_000_000, 4096)], 16384)
    if machine.gpus:
        dim, layers = _step(tokens, [(3_000_000, (256, 6)), (100_000_000, (512, 8))], (768, 12))
        longest, batch, ranks, budget = 1024, 64, machine.gpus, GPU_TOKENS
    else:
        dim, layers = _step(tokens, [(300_000, (128, 4))], (256, 4))
        longest, batch, ranks, budget = 256, 16, min(2, machine.cores), CPU_TOKENS
    # At least a few hundred sequences, so that an epoch is not one step.
    seq_len = next((n for n in (1024, 512, 256, 128, 64, 32) if n <= longest and tokens >= 200 * n), 32)
    batch -= batch % ranks or 0
    batch = max(batch, ranks)
    per_step = batch * seq_len
    steps = max(20, min(budget, MOST_EPOCHS * tokens) // per_step)
    per_rank = batch // ranks
    micro = max(m for m in range(1, min(8, per_rank) + 1) if per_rank % m == 0)
    return Sizes(
        vocab_size=vocab_size,
        dim=dim,
        num_layers=layers,
        num_heads=dim // 64,
        ffn_dim=-(-dim * 8 // 3 // 64) * 64,
        seq_len=seq_len,
        global_batch_size=batch,
        micro_batch_size=micro,
        ranks=ranks,
        steps=steps,
        learning_rate=3e-3 if dim <= 256 else 1e-3,
        precision="bfloat16" if machine.bfloat16 else "float32",
    )


def _cpu_has(flags: Sequence[str]) -> bool:
    try:
        lines = CPU_FILE.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    known = next((line for line in lines if line.startswith(("flags", "Features"))), "").split()
    return any(flag in known for flag in flags)


def _step(value: int, limits: Sequence[tuple[int, T]], beyond: T) -> T:
    return next((chosen for limit, chosen in limits if value < limit), beyond)


def write_config(data: str, name: str | None, machine: Machine) -> str:
    """A commented config for the text at `data`, as YAML. Raises InputError when there is no text."""
    files = discover((InputConfig(path=data),))
    if not any(file.size for file in files):
        raise InputError(
            f"There is no text at {data}: {_counted(len(files), 'file')}, all empty. Name a folder with text in it."
        )
    sizes = choose_sizes(sum(file.size for file in files), machine)
    return _render(data, name or default_name(data), files, sizes, machine)


def default_name(data: str) -> str:
    """The file that the config is redirected to names the run, else the data do."""
    target = _redirected_to()
    for candidate in (target.stem if target else "", Path(data.rstrip(":/")).stem, "my-model"):
        name = re.sub(r"[^a-z0-9._-]+", "-", candidate.lower()).strip("-._")[:NAME_MAX_LENGTH]
        if re.fullmatch(NAME_PATTERN, name):
            return name
    return "my-model"


def _redirected_to() -> Path | None:
    """The YAML file that standard output goes to; None for a terminal, a pipe, or where this cannot be known."""
    try:
        path = Path(f"/proc/self/fd/{sys.stdout.fileno()}").readlink()
    except (OSError, ValueError, AttributeError):
        return None
    return path if path.suffix in (".yaml", ".yml") and path.is_file() else None


def _render(data: str, name: str, files: list[SourceFile], sizes: Sizes, machine: Machine) -> str:
    total = sum(file.size for file in files)
    is_jsonl = any(file.format == "jsonl" for file in files)
    return TEMPLATE.format(
        name=name,
        quoted_name=_scalar(name),
        quoted_data=_scalar(data),
        files=_counted(len(files), "jsonl file" if is_jsonl else "file"),
        documents="a line" if is_jsonl else "each",
        megabytes=total / 1e6,
        machine=_counted(machine.gpus, "GPU") if machine.gpus else _counted(machine.cores, "core"),
        sizes=sizes,
        million_tokens=sizes.tokens / 1e6,
        kv_heads=max(1, sizes.num_heads // 2),
        warmup=max(1, sizes.steps // 12),
        save=max(1, sizes.steps // 4),
        accumulate=_counted(sizes.global_batch_size // (sizes.micro_batch_size * sizes.ranks), "pass", "passes"),
        passes=sizes.tokens / max(1, total / BYTES_PER_TOKEN),
        prompts=_prompts(files),
    )


def _counted(number: int, one: str, several: str | None = None) -> str:
    return f"{number:,} {one if number == 1 else several or one + 's'}"


def _scalar(text: str) -> str:
    """The text as a YAML scalar on one line."""
    return yaml.safe_dump(text, allow_unicode=True, width=10_000, default_style='"').strip()


def _prompts(files: list[SourceFile]) -> str:
    code = sum(file.name.endswith((".py", ".rs", ".go", ".c", ".h", ".cpp", ".java", ".js", ".ts")) for file in files)
    return '["def ", "import ", "class "]' if code > len(files) / 2 else '["The ", "It was ", "In "]'
