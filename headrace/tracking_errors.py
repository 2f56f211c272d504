"""What MLflow's failures mean here. They are translated where MLflow is called: nothing else knows its exceptions."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from headrace.errors import HeadraceError, NotFound, Terminal, TrackingUnavailable
from headrace.tracking_address import redact, redact_text

if TYPE_CHECKING:
    from mlflow.exceptions import MlflowException

_TRANSIENT = {
    "INTERNAL_ERROR",
    "IO_ERROR",
    "TEMPORARILY_UNAVAILABLE",
    "WORKSPACE_TEMPORARILY_UNAVAILABLE",
    "DEADLINE_EXCEEDED",
    "REQUEST_LIMIT_EXCEEDED",
    "SERVICE_UNDER_MAINTENANCE",
}


class AlreadyExists(Terminal):
    """MLflow already has something of that name."""


@contextmanager
def translated(what: str, uri: str) -> Iterator[None]:
    """Failures of MLflow within the block become ours: away, not found, exists, or refused.

    `what` completes "MLflow could not be ...".
    """
    from mlflow.exceptions import MlflowException

    try:
        yield
    except MlflowException as error:
        raise _translate(error, what, uri) from error
    except OSError as error:
        raise TrackingUnavailable(f"MLflow at {redact(uri)} could not be {what}: {error}") from error
    except Exception as error:
        # The database's own errors, which MLflow lets through while it opens or migrates its tables.
        if not type(error).__module__.startswith("sqlalchemy."):
            raise
        reason = redact_text(str(error).partition("[SQL")[0], uri)
        raise TrackingUnavailable(f"MLflow at {redact(uri)} could not be {what}: {reason}") from error


def _translate(error: "MlflowException", what: str, uri: str) -> HeadraceError:
    reason = redact_text(str(error.message), uri)
    if " failed with exception " in reason:
        reason = "it does not answer."  # the rest is the history of urllib3's retries
    if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "NOT_FOUND"):
        return NotFound(f"MLflow at {redact(uri)} was {what}, but does not have it: {reason}")
    if error.error_code in ("RESOURCE_ALREADY_EXISTS", "ALREADY_EXISTS"):
        return AlreadyExists(f"MLflow at {redact(uri)} was {what}, but has it already: {reason}")
    if error.error_code in _TRANSIENT:
        return TrackingUnavailable(f"MLflow at {redact(uri)} could not be {what}: {reason}")
    return Terminal(f"MLflow at {redact(uri)} was {what} and refused: {reason}")
