"""Prefect inside one command: settings that leave the user's own profile alone, and a server that ends with us.

Prefect would start a temporary server itself, but that one survives when this process is killed. Ours is told by the
kernel when its parent is gone. `PREFECT_API_URL` is honoured: then nothing is started here.

Everything here happens before prefect is imported, so this module does not import it.
"""

import contextlib
import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, MutableMapping
from pathlib import Path

from flows.services_file import alone_with_embedded_server
from headrace.environment import prefect_home
from headrace.errors import ConfigError, HeadraceError, Retryable
from headrace.file_lock import FileLock
from tasks.child import command_of

START_SECONDS = 180
"""The first start on a fresh home creates the database: 16 s on two idle cores, more than a minute was reported."""

HEARTBEAT_SECONDS = "30"
"""How often a flow run says that it lives; deployments/prefect.yaml and its automation say the same."""

LOG_NAME = "server.log"
DATABASE_NAME = "prefect.db"


def settings() -> dict[str, str]:
    """Prefect's settings for a command of ours; those that the user set win."""
    return {
        "PREFECT_HOME": str(prefect_home()),
        "PREFECT_PROFILES_PATH": str(prefect_home() / "profiles.toml"),
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": str(START_SECONDS),
        # With analytics on, the server prints a traceback about a locked database when it starts.
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
        # What a user has to know is said by our own terminal.
        "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
        "PREFECT_LOGGING_SERVER_LEVEL": "ERROR",
        "PREFECT_CLI_PROMPT": "false",
        # On a server that stays, a run that is silent for six of these is marked as crashed. Two names: Prefect gave it
        # another one after the oldest version that we take.
        "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": HEARTBEAT_SECONDS,
        "PREFECT_RUNNER_HEARTBEAT_FREQUENCY": HEARTBEAT_SECONDS,
    }


def apply_settings(environment: MutableMapping[str, str] = os.environ) -> None:
    """Put the settings into the environment, and make Prefect's folder; call it before prefect is imported.

    Raises ConfigError when the folder cannot be made.
    """
    for name, value in settings().items():
        environment.setdefault(name, value)
    # Prefect makes it when it is imported, but not its parent, and warns when that fails.
    folder = Path(environment["PREFECT_HOME"]).expanduser()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"Prefect's folder {folder} cannot be made: {error.strerror}. Set HEADRACE_HOME to a folder that can be "
            "written to."
        ) from error


class PrefectUnavailable(Retryable):
    """The Prefect API did not answer."""


class EmbeddedServer:
    """A Prefect API of this command alone, on loopback; started early, waited for when it is needed."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, log: Path, lock: FileLock, alone: FileLock) -> None:
        self._process = process
        self._log = log
        self._lock = lock
        self._alone = alone
        self.url = f"http://127.0.0.1:{port}/api"

    @classmethod
    def start(cls) -> "EmbeddedServer":
        """Start the server and return at once; only while another command makes the database, wait for that.

        Raises ServicesDown while `headrace up` has the database.
        """
        alone = alone_with_embedded_server()
        home = Path(os.environ.get("PREFECT_HOME", prefect_home()))
        home.mkdir(parents=True, exist_ok=True)
        lock = FileLock(home / "database.lock")
        lock.acquire()
        if (home / DATABASE_NAME).exists():
            lock.release()
        port = free_port()
        log = home / LOG_NAME
        # These three are what Prefect gives its own temporary server; the API needs no pages and no log shipping.
        environment = {
            **os.environ,
            "PREFECT_UI_ENABLED": "0",
            "PREFECT__SERVER_EPHEMERAL": "1",
            "PREFECT__SERVER_FINAL": "1",
        }
        app = "prefect.server.api.server:create_app"
        options = ["--factory", app, "--host", "127.0.0.1", "--port", str(port), "--log-level", "error"]
        with log.open("wb") as output:
            process = subprocess.Popen(
                command_of("uvicorn", *options, "--lifespan", "on"),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                # Ctrl-C is for us: the server has to hear how the flow ended.
                start_new_session=True,
            )
        return cls(process, port, log, lock, alone)

    def wait(self, seconds: float = START_SECONDS) -> None:
        """Wait until the API answers; raises HeadraceError with the server's last words when it does not."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if _answers(f"{self.url}/health"):
                self._lock.release()
                return
            if self._process.poll() is not None:
                break
            time.sleep(0.1)
        self.stop()
        lines = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        reason = lines[-1] if lines else f"no answer within {seconds:.0f} seconds"
        raise HeadraceError(
            f"The embedded Prefect server did not start: {reason}. The log is {self._log}; to use a server of your "
            "own, set PREFECT_API_URL."
        )

    def stop(self) -> None:
        """End the server."""
        self._lock.release()
        if self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(5)
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        self._alone.release()


@contextlib.contextmanager
def prefect_api() -> Iterator[Callable[[], None]]:
    """Within the block PREFECT_API_URL names an API: the user's own, or an embedded one that ends with the block.

    The embedded one is only started here, so that imports can go on meanwhile: call what the block gets before the
    flow. Raises ConfigError for a URL of another kind, and
    PrefectUnavailable when the user's own does not answer: before prefect is loaded.
    """
    apply_settings()
    given = os.environ.get("PREFECT_API_URL")
    if given:
        if not given.startswith(("http://", "https://")):
            raise ConfigError(f"PREFECT_API_URL is {given!r}, but it must start with http:// or https://.")
        _require_answer(given)
        yield lambda: None
        return
    server = EmbeddedServer.start()
    os.environ["PREFECT_API_URL"] = server.url
    # Log lines of an API that ends with the command would be read by nobody.
    os.environ.setdefault("PREFECT_LOGGING_TO_API_ENABLED", "false")
    try:
        yield server.wait
    finally:
        server.stop()
        del os.environ["PREFECT_API_URL"]


def _require_answer(url: str) -> None:
    if not _answers(f"{url.rstrip('/')}/health"):
        raise PrefectUnavailable(
            f"The Prefect API at {url} does not answer. Start it, or unset PREFECT_API_URL to use an embedded one; "
            "then give the same command again."
        )


def free_port() -> int:
    """Return a port of loopback that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False
