"""One small corpus with its tokenizer, and the config that the chaos tests run on it."""

import copy
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.chaos.harness import Lab

STEPS = 12
CONFIG: dict[str, Any] = {
    "name": "chaos",
    "data": {"name": "chaos", "validation_fraction": 0.2, "processes": 2},
    "model": {
        "vocab_size": 512,
        "dim": 32,
        "num_layers": 2,
        "num_heads": 2,
        "num_kv_heads": 1,
        "ffn_dim": 64,
        "max_seq_len": 32,
    },
    "training": {"steps": STEPS, "global_batch_size": 8, "seq_len": 32, "precision": "float32"},
    "schedule": {"warmup_steps": 2},
    "launch": {"ranks_per_node": 2, "threads_per_rank": 1},
    "layout": {"micro_batch_size": 4, "device": "cpu"},
    "checkpoint": {"save_every": 4},
    "evaluation": {"every": 6, "max_tokens": 4096, "prompts": ["def "], "sample_tokens": 8},
}


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty real files of the standard library, the smallest above 2 kB."""
    folder = tmp_path_factory.mktemp("corpus")
    library = Path(sysconfig.get_paths()["stdlib"])
    sources = sorted((p for p in library.glob("*.py") if p.stat().st_size > 2000), key=lambda p: p.stat().st_size)
    for source in sources[:40]:
        (folder / source.name).write_bytes(source.read_bytes())
    return folder


@pytest.fixture(scope="session")
def tokenizer_file(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer that somebody else made: the corpus may change, it does not."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train([str(path) for path in sorted(corpus.iterdir())], trainer)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@pytest.fixture
def lab(tmp_path: Path, corpus: Path, tokenizer_file: Path) -> Lab:
    """A fresh state folder with the small config."""
    return make_lab(tmp_path, corpus, tokenizer_file)


@pytest.fixture
def new_lab(tmp_path: Path, corpus: Path, tokenizer_file: Path) -> Callable[[str], Lab]:
    """Makes more than one state folder for a test."""

    def make(name: str) -> Lab:
        folder = tmp_path / name
        folder.mkdir()
        return make_lab(folder, corpus, tokenizer_file)

    return make


def make_lab(folder: Path, corpus: Path, tokenizer_file: Path) -> Lab:
    config = copy.deepcopy(CONFIG)
    config["data"]["inputs"] = [{"path": str(corpus), "include": ["*.py"]}]
    config["tokenizer"] = {"path": str(tokenizer_file)}
    return Lab(folder, config)
