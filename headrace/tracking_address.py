"""Where MLflow is: its address, whether anything answers there, and how the address is shown to people."""

import os
import socket
import sqlite3
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

from headrace.environment import mlflow_database
from headrace.errors import ConfigError, TrackingUnavailable

PROBE_SECONDS = 5.0
DATABASE_PORTS = {"postgresql": 5432, "mysql": 3306, "mssql": 1433}
PAGE_QUERY = "?workflowType=machine_learning"
"""Without it, MLflow opens a page where runs and the registry are not in the menu."""

SERVER_SETTINGS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
}
"""Of a server that we start: it shows pages, and needs no second process for jobs."""


def default_uri() -> str:
    """Address of the tracking store: MLFLOW_TRACKING_URI, or the database in the state folder."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{mlflow_database()}"


def is_server(uri: str) -> bool:
    """Whether the address is an MLflow server, whose pages can be opened."""
    return uri.startswith(("http://", "https://"))


def server_arguments(port: int) -> list[str]:
    """Arguments of `python -m mlflow` that serve the default database on loopback."""
    place = ["--backend-store-uri", f"sqlite:///{mlflow_database()}", "--host", "127.0.0.1", "--port", str(port)]
    return ["server", *place, "--workers", "1"]


def redact(uri: str) -> str:
    """The address without the name and the password that may be in it."""
    parts = urllib.parse.urlsplit(uri)
    if "@" not in parts.netloc:
        return uri
    return urllib.parse.urlunsplit(parts._replace(netloc="***@" + parts.netloc.rsplit("@", 1)[-1]))


def server_answers(uri: str, timeout: float = PROBE_SECONDS) -> bool:
    """Whether a server is there: every answer counts but one that says that it cannot serve."""
    try:
        with urllib.request.urlopen(f"{uri.rstrip('/')}/health", timeout=timeout):
            return True
    except urllib.error.HTTPError as error:
        error.close()
        return error.code < 500
    except (OSError, ValueError):
        return False


def run_page(uri: str, experiment_id: str, run_id: str) -> str:
    """Address of a run's page on a server."""
    return f"{redact(uri).rstrip('/')}/#/experiments/{experiment_id}/runs/{run_id}{PAGE_QUERY}"


def redact_text(text: str, uri: str) -> str:
    """`text` as one line without the credentials of `uri`."""
    return " ".join(text.replace(uri, redact(uri)).split())


def require_answer(uri: str) -> None:
    """Look whether anything answers there: MLflow's own client would try for minutes.

    Raises TrackingUnavailable, naming the address, within seconds, and ConfigError for an address of another kind.
    """
    if is_server(uri):
        if not server_answers(uri):
            raise TrackingUnavailable(
                f"The MLflow server at {redact(uri)} does not answer. Start it, or unset MLFLOW_TRACKING_URI to use "
                "the database in the state folder; then give the same command again."
            )
        return
    parts = urllib.parse.urlsplit(uri)
    kind = parts.scheme.partition("+")[0]
    try:
        if path := sqlite_path(uri):
            _open_sqlite(path)
        elif kind in DATABASE_PORTS and parts.hostname:
            socket.create_connection((parts.hostname, parts.port or DATABASE_PORTS[kind]), PROBE_SECONDS).close()
        else:
            raise ConfigError(
                f"MLFLOW_TRACKING_URI is {redact(uri)!r}, but it must be the address of a server (http://, https://) "
                f"or of a database (sqlite:///, {'://, '.join(DATABASE_PORTS)}://)."
            )
    except (OSError, sqlite3.Error) as error:
        raise TrackingUnavailable(f"The MLflow database at {redact(uri)} cannot be opened: {error}.") from error


def sqlite_path(uri: str) -> Path | None:
    """The file of an SQLite address; None for other addresses."""
    if not uri.startswith("sqlite"):
        return None
    return Path(uri.partition(":///")[2].partition("?")[0])


def _open_sqlite(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    connection = sqlite3.connect(path, timeout=PROBE_SECONDS)
    try:
        connection.execute("PRAGMA schema_version")
    finally:
        connection.close()
