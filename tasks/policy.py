"""Which failures Prefect's retries repeat: the class of the error says it, nothing else."""

from typing import Any

from headrace.errors import HeadraceError
from tasks.console import terminal

RETRY_DELAYS = [1.0, 2.0, 5.0, 10.0, 20.0, 30.0]
"""Seconds before each further try; the last one repeats."""

SHORT_RETRIES = 8
"""Tries of a stage after the first, for a store or a tracking server that is away for two minutes."""

TELLS_ITSELF = "train"
"""The stage that says by itself how its tries end: it knows more about them."""

TRAINING_RETRIES = 10_000
"""The progress rule ends a training that gets nowhere; a long one may lose a rank every day for years."""


def worth_another_try(task: Any, task_run: Any, state: Any) -> bool:  # noqa: ARG001 - Prefect calls it by position
    """Whether the error that ended a try says that another one may succeed."""
    error = state.result(raise_on_failure=False)
    again = isinstance(error, HeadraceError) and error.retryable
    if again and task is not None and task.name != TELLS_ITSELF:
        terminal().note(f"{task.name}: {error} Trying again.")
    return again
