from pathlib import Path

import pytest

from headrace.storage import Storage
from tests.data_prep.corpus import train_small


@pytest.fixture
def store(tmp_path: Path) -> Storage:
    return Storage.open(tmp_path / "store")


@pytest.fixture
def work_dir(tmp_path: Path) -> Path:
    return tmp_path / "work"


@pytest.fixture(scope="session")
def small_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train_small().save(str(path))
    return path
