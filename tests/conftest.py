"""Fixtures for all tests."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.rank_server import RankServer


@pytest.fixture(scope="session")
def _warm_ranks() -> Iterator[RankServer]:
    server = RankServer()
    yield server
    server.close()


@pytest.fixture
def run_ranks(_warm_ranks: RankServer) -> Callable[..., list[Any]]:
    """`run_ranks(world_size, function, *arguments, seconds=60)`: the results of all ranks, in rank order.

    Each rank is a process forked from a warm parent, in a gloo group, and calls `function(world, *arguments)`.
    `function` must stand at the top of its test module; arguments and results travel as pickles.
    """
    return _warm_ranks.run
