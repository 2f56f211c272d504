"""One process that `headrace up` keeps alive, and the environment of all of them."""

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from flows.embedded import apply_settings
from flows.services_file import ServiceRecord
from flows.services_marks import SERVICE, UP, kill
from headrace.environment import HOME_VARIABLE, home
from headrace.errors import HeadraceError
from headrace.process import start_time
from headrace.tracking_address import SERVER_SETTINGS
from tasks.child import command_of

DELAYS = (1.0, 2.0, 4.0, 8.0, 16.0)
"""Seconds before a process is started again, by how often it died in a row."""

LEASES_IN_FILES = "prefect.server.concurrency.lease_storage.filesystem"
"""Below Prefect's home."""

STEADY_SECONDS = 60.0
"""After so long a death counts as the first one again."""


class ServiceProcess:
    """A child that is started again when it dies, with growing delays; its output goes to a log."""

    def __init__(
        self, name: str, command: Sequence[str], environment: dict[str, str], log: Path, url: str | None = None
    ) -> None:
        self.name = name
        self.log = log
        self.url = url
        self.command = list(command)
        self.deaths = 0
        self.due: float | None = None
        """When it is started again, by the monotonic clock; None while it runs."""
        self._environment = {**environment, SERVICE: name}
        self._process: subprocess.Popen[bytes] | None = None
        self._started = 0.0
        self._since = ""

    def start(self) -> None:
        """Start it; returns at once."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        module, *arguments = self.command
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                command_of(module, *arguments, end=signal.SIGTERM),
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                # Ctrl-C is for `up`, which ends its children in order.
                start_new_session=True,
            )
        self._started = time.monotonic()
        self._since = datetime.now(UTC).isoformat(timespec="seconds")
        self.due = None

    @property
    def pid(self) -> int:
        """Process id of the last start."""
        assert self._process is not None, "it was started"
        return self._process.pid

    @property
    def since(self) -> str:
        """Time of the last start, with zone."""
        return self._since

    def exit_code(self) -> int | None:
        """How it ended; None while it runs."""
        return self._process.poll() if self._process is not None else None

    def plan_restart(self, mark: str) -> float:
        """Clean up after its death and say in how many seconds it is started again.

        Raises HeadraceError when it died too often in a row.
        """
        steady = time.monotonic() - self._started >= STEADY_SECONDS
        self.deaths = 1 if steady else self.deaths + 1
        kill(mark, self.name, flow_runs=False)  # what it started may still hold its port
        if self.deaths > len(DELAYS):
            raise HeadraceError(
                f"{self.name} died {self.deaths} times in a row, the last time with {how(self.exit_code() or 0)}. Its "
                f"log is {self.log}."
            )
        delay = DELAYS[self.deaths - 1]
        self.due = time.monotonic() + delay
        return delay

    def terminate(self) -> None:
        """Ask it to end."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()

    def wait(self, deadline: float) -> bool:
        """Wait for its end until the deadline of the monotonic clock; says whether it ended."""
        while self.exit_code() is None and self._process is not None:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.05)
        return True

    def record(self) -> ServiceRecord:
        """What others have to know of it."""
        return ServiceRecord(
            name=self.name,
            pid=self.pid,
            start_time=start_time(self.pid) or 0,
            since=self._since,
            url=self.url,
            log=str(self.log),
        )


def how(code: int) -> str:
    """An exit code in words."""
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def last_words(log: Path) -> str:
    """The last line of a log that says something."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    except FileNotFoundError:
        lines = []
    return lines[-1].strip() if lines else "it said nothing"


def environment_of_services(mark: str, api: str, mlflow: str) -> dict[str, str]:
    """The environment of everything that `up` starts, down to the training processes of flow runs."""
    environment = {
        **os.environ,
        **SERVER_SETTINGS,
        HOME_VARIABLE: str(home()),
        UP: mark,
        "PREFECT_API_URL": api,
        "MLFLOW_TRACKING_URI": mlflow,
    }
    login = os.environ.get("PREFECT_SERVER_API_AUTH_STRING")
    if login:
        environment.setdefault("PREFECT_API_AUTH_STRING", login)
    # A log that is kept may say more than a terminal.
    environment.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "INFO")
    environment.setdefault("PREFECT_LOGGING_SERVER_LEVEL", "WARNING")
    # On one machine a run should start when it is asked for.
    environment.setdefault("PREFECT_WORKER_QUERY_SECONDS", "3")
    environment.setdefault("PREFECT_WORKER_PREFETCH_SECONDS", "3")
    # While the server is started again, a training goes on and asks itself whether it was cancelled (tasks.stopping);
    # the alternative would end it.
    environment.setdefault("PREFECT_RUNNER_CRASH_ON_CANCELLATION_FAILURE", "false")
    # In memory, its default, a server that is started again would forget whose places it has to free.
    environment.setdefault("PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE", LEASES_IN_FILES)
    apply_settings(environment)
    return environment
