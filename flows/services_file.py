"""What tells other commands that `headrace up` runs on this state folder.

    HEADRACE_HOME/up.lock         held alone by `up`, and together by commands with a Prefect server of their own:
                                  two kinds of servers never open the same database
    HEADRACE_HOME/services.json   addresses and processes; there only while all of them were live once

A process is named by its id and its start time, so a later process with the same id is never taken for it.
"""

import contextlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from flows.services_api import answers
from headrace.config import Part
from headrace.environment import home
from headrace.errors import ConfigError, HeadraceError, Retryable
from headrace.file_lock import FileLock
from headrace.process import machine_id, pid_alive, start_time
from headrace.terminal import Terminal
from headrace.tracking_address import PAGE_QUERY

ANSWER_SECONDS = 60.0
"""A server that is started again after it died needs about ten seconds."""

START_SECONDS = 240.0


class ServicesDown(Retryable):
    """`headrace up` runs, but a server of it does not answer."""


class ServiceRecord(Part):
    """One process that `up` started."""

    name: Literal["prefect", "mlflow", "worker"]
    pid: int
    start_time: int
    since: str
    """Time of its last start, with zone."""
    url: str | None
    log: str

    @property
    def alive(self) -> bool:
        """Whether this very process runs."""
        return pid_alive(self.pid, self.start_time)


class ServicesRecord(Part):
    """`services.json`."""

    format_version: Literal[1] = 1
    machine: str
    """Equal machines see each other's process ids."""
    pid: int
    """Of `headrace up`."""
    start_time: int
    since: str
    prefect_api: str
    prefect_ui: str
    mlflow: str
    services: tuple[ServiceRecord, ...]

    @property
    def alive(self) -> bool:
        """Whether the `up` that wrote this runs, on this machine."""
        return self.machine == machine_id() and pid_alive(self.pid, self.start_time)

    @property
    def mlflow_page(self) -> str:
        """The page to open."""
        return f"{self.mlflow}/#/experiments{PAGE_QUERY}"


def services_path() -> Path:
    """Return where the record lies."""
    return home() / "services.json"


def lock_path() -> Path:
    """Return the file whose lock says who may open the databases."""
    return home() / "up.lock"


def read_record() -> ServicesRecord | None:
    """The record, whether or not it is still true; None when there is none.

    Raises HeadraceError when the file is something else.
    """
    try:
        return ServicesRecord.model_validate_json(services_path().read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        raise HeadraceError(
            f"{services_path()} cannot be read: {' '.join(str(error).split())}. If no `headrace up` runs, remove it."
        ) from error


def write_record(record: ServicesRecord) -> None:
    """Write the record for this user only, all of it or nothing."""
    path = services_path()
    new = path.with_name(f"{path.name}.new")
    new.unlink(missing_ok=True)
    file = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(file, "w", encoding="utf-8") as output:
        output.write(record.model_dump_json(indent=1))
    new.replace(path)


def remove_record(pid: int, started: int) -> None:
    """Remove the record when it is the one of this `up`."""
    with contextlib.suppress(HeadraceError):
        record = read_record()
        if record is not None and (record.pid, record.start_time) == (pid, started):
            services_path().unlink(missing_ok=True)


def live_record() -> ServicesRecord | None:
    """The record of an `up` that runs on this machine, or None."""
    record = read_record()
    return record if record is not None and record.alive else None


def holder() -> tuple[int, int] | None:
    """Process id and start time of the `up` that runs or starts on this state folder; None when there is none."""
    try:
        found: Any = json.loads(lock_path().read_text(encoding="utf-8") or "null")
    except (FileNotFoundError, ValueError):
        return None
    if not isinstance(found, dict) or found.get("machine") != machine_id():
        return None
    pid, started = int(found["pid"]), int(found["start_time"])
    return (pid, started) if pid_alive(pid, started) else None


@contextlib.contextmanager
def only_up() -> Iterator[tuple[int, int]]:
    """Be the only `up` of this state folder; gives this process's id and start time. Raises ConfigError."""
    lock = FileLock(lock_path())
    if not lock.try_acquire():
        lock.release()
        other = holder()
        raise ConfigError(
            f"`headrace up` runs already on {home()} (process {other[0]}). `headrace status` shows it, and "
            "`headrace down` ends it."
            if other
            else f"A headrace command with a Prefect server of its own works on {home()}. Wait until it has ended, or "
            "stop it (it continues later); then give `headrace up` again."
        )
    pid, started = os.getpid(), start_time(os.getpid()) or 0
    lock.write(json.dumps({"pid": pid, "start_time": started, "machine": machine_id()}))
    try:
        yield pid, started
    finally:
        lock.write("")
        lock.release()


def alone_with_embedded_server() -> FileLock:
    """The lock of a command that opens Prefect's database itself; the caller releases it. Raises ServicesDown."""
    lock = FileLock(lock_path())
    if lock.try_acquire(shared=True):
        return lock
    lock.release()
    raise ServicesDown(f"`headrace up` is starting on {home()}. Give the command again when it has said its pages.")


@contextlib.contextmanager
def using_services(terminal: Terminal | None = None, *, prefect: bool = False) -> Iterator[ServicesRecord | None]:
    """Within the block the servers of a running `up` are used, where the environment names no others.

    Waits for an `up` that is starting or is starting a server again. Raises ServicesDown when one does not answer.
    """
    record = _settled(terminal) if prefect else live_record()
    found = {"MLFLOW_TRACKING_URI": record.mlflow, "PREFECT_API_URL": record.prefect_api} if record else {}
    if not prefect:
        found.pop("PREFECT_API_URL", None)
    new = {name: url for name, url in found.items() if name not in os.environ}
    for name, url in new.items():
        _require_answer(name, url)
    os.environ.update(new)
    try:
        yield record
    finally:
        for name in new:
            os.environ.pop(name, None)


def _settled(terminal: Terminal | None) -> ServicesRecord | None:
    """The record, after waiting for an `up` that has not written it yet."""
    deadline = time.monotonic() + START_SECONDS
    told = False
    while (record := live_record()) is None and (other := holder()) is not None and time.monotonic() < deadline:
        if terminal is not None and not told:
            terminal.note(f"`headrace up` (process {other[0]}) is starting on this state folder; waiting for it.")
            told = True
        time.sleep(0.2)
    return record


def _require_answer(name: str, url: str) -> None:
    deadline = time.monotonic() + ANSWER_SECONDS
    while not answers(f"{url}/health"):
        if live_record() is None or time.monotonic() > deadline:
            raise ServicesDown(
                f"The server of `headrace up` at {url} does not answer. `headrace status` says more; to use another "
                f"server, set {name}."
            )
        time.sleep(0.5)
