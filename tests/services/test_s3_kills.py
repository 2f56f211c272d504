"""The kills of tests/chaos with the store on a real S3 server: the same tests, with this folder's labs."""

import pytest

from tests.chaos.test_kills import (
    SLOW_STEPS,
    test_every_process_killed_at_every_point_of_training,  # noqa: F401 - the test itself
    test_the_command_killed_at_every_point_after_training,  # noqa: F401 - the test itself
)
from tests.mlflow_database import NOLOAD

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings(NOLOAD)]


@pytest.fixture(autouse=True)
def slower_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A save on a server takes longer than one on a folder, and each has to be committed before the next one is due."""
    monkeypatch.setitem(SLOW_STEPS, "seconds", 0.8)
