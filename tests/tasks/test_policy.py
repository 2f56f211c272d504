"""The class of an error says whether another try is worth it."""

from types import SimpleNamespace

import pytest
from prefect.cache_policies import NO_CACHE
from prefect.states import Completed, Crashed, Failed

from headrace import errors
from tasks.evaluate import evaluate
from tasks.export import export
from tasks.policy import RETRY_DELAYS, worth_another_try
from tasks.prepare import prepare
from tasks.record import complete_run, open_run
from tasks.register import register
from tasks.train import train


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (errors.AttemptFailed("a rank died"), True),
        (errors.StorageUnavailable("503"), True),
        (errors.TrackingUnavailable("away"), True),
        (errors.Terminal("exhausted"), False),
        (errors.ConfigError("vocab"), False),
        (errors.InputError("empty"), False),
        (errors.DamagedData("digest"), False),
        (errors.Cancelled("stopped"), False),
        (errors.StorageFull("no room"), False),
        (RuntimeError("a defect"), False),
    ],
)
def test_the_class_of_the_error_decides(error, again):
    assert worth_another_try(None, None, Failed(data=error)) is again


@pytest.mark.parametrize(("stage", "told"), [(export, 1), (train, 0)])
def test_a_stage_that_is_tried_again_says_why(stage, told, monkeypatch):
    notes = []
    monkeypatch.setattr("tasks.policy.terminal", lambda: SimpleNamespace(note=notes.append))
    worth_another_try(stage, None, Failed(data=errors.AttemptFailed("Killed by SIGKILL.")))
    worth_another_try(stage, None, Failed(data=errors.Terminal("The end.")))
    assert notes == [f"{stage.name}: Killed by SIGKILL. Trying again."] * told


def test_only_an_error_is_worth_another_try():
    assert not worth_another_try(None, None, Completed(data=1))
    assert not worth_another_try(None, None, Crashed(data=KeyboardInterrupt()))


@pytest.mark.parametrize("stage", [prepare, open_run, train, export, evaluate, register, complete_run])
def test_every_stage_asks_this_policy_and_nobody_else(stage):
    assert stage.retry_condition_fn is worth_another_try
    assert stage.retry_delay_seconds == RETRY_DELAYS
    assert stage.retries >= 5
    assert not stage.persist_result
    assert stage.cache_policy == NO_CACHE
