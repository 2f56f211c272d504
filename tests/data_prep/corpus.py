"""Small corpora, tokenizers and preparations that the tests of the data stage share."""

import hashlib
import json
import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from data_prep.config import DataConfig, InputConfig, TokenizerConfig
from data_prep.dataset import Dataset, PrepareResult, open_dataset, prepare
from data_prep.plan import Layout
from data_prep.text import Piece
from headrace.storage import Storage

EOS = "<|endoftext|>"
WORDS = [
    *("river", "stone", "mill", "wheel", "water", "turns", "under", "the", "old", "bridge", "and"),
    *("naïve", "cafés", "水", "車", "don't", "1984", ";\n\n", "{x}", "\t"),
]


def write_files(folder: Path, number: int, words: int = 120) -> dict[str, str]:
    """Write `number` text files of different lengths and return their texts by relative name."""
    texts = {}
    for index in range(number):
        chance = random.Random(index)
        text = " ".join(chance.choices(WORDS, k=chance.randint(words // 2, words)))
        name = f"part{index % 3}/file{index:03d}.txt"
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
        texts[name] = text
    return texts


def write_jsonl(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


def train_small(vocab_size: int = 300) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([" ".join(WORDS * 20)], trainer)
    return tokenizer


def piece_of(path: Path, *, text_field: str | None = None, start: int = 0, stop: int | None = None) -> Piece:
    data = path.read_bytes()
    stop = len(data) if stop is None else stop
    digest = hashlib.sha256(data[start:stop]).hexdigest()
    return Piece(path.name, path, "jsonl" if text_field else "document", text_field, start, stop, digest)


def prepare_small(
    store: Storage,
    work_dir: Path,
    path: Path | str,
    *,
    tokenizer: Path | TokenizerConfig | None = None,
    layout: Layout | None = None,
    input_options: dict[str, Any] | None = None,
    progress: Any = None,
    **data: Any,
) -> PrepareResult:
    """Prepare one input with defaults that are quick: one process, a small vocabulary."""
    config = DataConfig(
        **{
            "name": "small",
            "inputs": (InputConfig(path=str(path), **(input_options or {})),),
            "processes": 1,
            "validation_fraction": 0.1,
            **data,
        }
    )
    if not isinstance(tokenizer, TokenizerConfig):
        tokenizer = TokenizerConfig(path=str(tokenizer) if tokenizer else None, vocab_size=300)
    return prepare(store, config, tokenizer, work_dir=work_dir, layout=layout, progress=progress)


def unit_keys(dataset: Dataset) -> list[str]:
    return [line["key"] for line in dataset.manifest.body["units"]]


def documents_of(dataset: Dataset, split: str, cache: Path) -> list[list[int]]:
    """The ids of every document of a split, its end token included."""
    stream = dataset.stream(split, cache)
    ids = stream.read(0, len(stream)).tolist()
    ends = stream.document_ends(0, len(stream)).tolist()
    return [ids[start:stop] for start, stop in zip([0, *ends], ends, strict=False)]


def open_result(store: Storage, result: PrepareResult) -> Dataset:
    return open_dataset(store, result.dataset_key)


def store_digests(store: Storage, *prefixes: str) -> dict[str, str]:
    """SHA-256 of every stored object, by key."""
    return {key: store.sha256(key) for prefix in prefixes for key in store.list(prefix)}


def units_on(store: Storage) -> set[str]:
    return {key.split("/")[1] for key in store.list("units") if key.endswith("COMMIT.json")}


def plan_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **fault: Any) -> None:
    """Plan one fault for this process and those it starts."""
    (tmp_path / "faults").mkdir(exist_ok=True)
    plan = tmp_path / "faults.json"
    plan.write_text(json.dumps({"dir": str(tmp_path / "faults"), "faults": [fault]}))
    monkeypatch.setenv("HEADRACE_FAULTS", str(plan))
