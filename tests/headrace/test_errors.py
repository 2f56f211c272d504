"""Exit codes and retry classes are what scripts and policies rely on."""

import inspect
import pickle

import pytest

from headrace import errors
from headrace.errors import HeadraceError

EXPECTED = {
    "HeadraceError": (1, False),
    "ConfigError": (2, False),
    "InputError": (2, False),
    "Terminal": (1, False),
    "StorageFull": (1, False),
    "Retryable": (1, True),
    "StorageUnavailable": (1, True),
    "AttemptFailed": (1, True),
    "TrackingUnavailable": (1, True),
    "DamagedData": (1, False),
    "CommitConflict": (1, False),
    "NotFound": (1, False),
    "Preempted": (3, False),
    "Cancelled": (3, False),
}


def test_every_error_is_known():
    found = {
        name: kind for name, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, HeadraceError)
    }
    assert {name: (kind.exit_code, kind.retryable) for name, kind in found.items()} == EXPECTED
    assert all(kind.retryable == issubclass(kind, errors.Retryable) for kind in found.values())
    for name in EXPECTED:
        assert name in (errors.__doc__ or ""), "the tree in the docstring is complete"


@pytest.mark.parametrize("name", EXPECTED)
def test_errors_cross_process_borders(name: str):
    error = getattr(errors, name)("The message is one sentence.")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == "The message is one sentence."
