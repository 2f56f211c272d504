"""A workspace and stand-ins for each test."""

from pathlib import Path

import pytest

from tasks.runs import Workspace
from tests.tasks.stand_ins import FakeRanks, FakeStages, make_workspace


@pytest.fixture
def space(tmp_path: Path) -> Workspace:
    return make_workspace(tmp_path)


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> FakeRanks:
    fake = FakeRanks()
    monkeypatch.setattr("tasks.train.run_attempt", fake)
    return fake


@pytest.fixture
def stages(monkeypatch: pytest.MonkeyPatch, space: Workspace) -> FakeStages:
    fake = FakeStages(space.storage)
    monkeypatch.setattr("tasks.export.run_module", fake)
    monkeypatch.setattr("tasks.evaluate.run_module", fake)
    return fake
