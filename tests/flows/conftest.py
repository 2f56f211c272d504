"""A Prefect server for the tests that run the flow, and a small corpus."""

from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def prefect_server() -> Iterator[None]:
    from prefect.testing.utilities import prefect_test_harness

    with prefect_test_harness(server_startup_timeout=180):
        yield


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty short texts, a few kilobytes each."""
    folder = tmp_path_factory.mktemp("corpus")
    for number in range(20):
        words = (f"word{(number * 31 + i * 7) % 97}" for i in range(400))
        (folder / f"{number:02d}.txt").write_text(" ".join(words), encoding="utf-8")
    return folder
