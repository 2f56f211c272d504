"""A real dataset on a real folder, made once for all tests of the engine."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from data_prep.config import DataConfig, InputConfig, TokenizerConfig
from data_prep.dataset import PrepareResult, prepare
from headrace.storage import Storage


@dataclass(frozen=True)
class TextDataset:
    """A prepared dataset of made-up sentences, with a vocabulary of 300 tokens."""

    root: Path
    """The folder of its store."""
    prepared: PrepareResult


@pytest.fixture(scope="session")
def text_dataset(tmp_path_factory: pytest.TempPathFactory) -> TextDataset:
    """The store that holds it; tests write their runs beside it, each under its own run id."""
    folder = tmp_path_factory.mktemp("text-dataset")
    texts = folder / "texts"
    texts.mkdir()
    for number in range(40):
        lines = (f"The quick brown fox number {number * line % 17} jumps over {line} lazy dogs." for line in range(60))
        (texts / f"{number:02d}.txt").write_text("\n".join(lines), encoding="utf-8")
    data = DataConfig(name="toy", inputs=(InputConfig(path=str(texts)),), validation_fraction=0.1, processes=1)
    root = folder / "store"
    prepared = prepare(Storage.open(root), data, TokenizerConfig(vocab_size=300), work_dir=folder / "scratch")
    return TextDataset(root, prepared)
