"""Real services for tests: once for all of them, and ways to disturb them."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.chaos.conftest import corpus, make_lab, tokenizer_file  # noqa: F401 - fixtures
from tests.chaos.harness import Lab

if TYPE_CHECKING:
    from tests.services.prefect_stack import Stack


@pytest.fixture(scope="session")
def _prefect_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator["Stack"]:
    from tests.services.prefect_stack import running_stack

    with running_stack(tmp_path_factory.mktemp("prefect")) as stack:
        yield stack


@pytest.fixture
def stack(_prefect_stack: "Stack") -> Iterator["Stack"]:
    """A Prefect server and a worker; what a test killed is there again for the next one."""
    yield _prefect_stack
    _prefect_stack.restore()


@pytest.fixture
def local_lab(tmp_path: Path, corpus: Path, tokenizer_file: Path) -> Lab:  # noqa: F811
    """A state folder with a store of its own, for the flow runs of one deployment."""
    return make_lab(tmp_path, corpus, tokenizer_file)
