"""Prefect's settings and its embedded server."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from flows.embedded import EmbeddedServer, PrefectUnavailable, apply_settings, free_port, prefect_api, settings
from headrace.errors import ConfigError, HeadraceError
from headrace.process import pid_alive

WAIT_SECONDS = 30


def test_the_users_own_profile_is_not_touched(monkeypatch, tmp_path):
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path))
    environment: dict[str, str] = {}
    apply_settings(environment)
    assert environment["PREFECT_HOME"] == f"{tmp_path}/prefect"
    assert environment["PREFECT_PROFILES_PATH"] == f"{tmp_path}/prefect/profiles.toml"
    assert environment["PREFECT_SERVER_ANALYTICS_ENABLED"] == "false"
    assert int(environment["PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS"]) >= 120


def test_what_the_user_set_wins(tmp_path):
    mine = str(tmp_path / "mine")
    environment = {"PREFECT_HOME": mine, "DO_NOT_TRACK": "0"}
    apply_settings(environment)
    assert (environment["PREFECT_HOME"], environment["DO_NOT_TRACK"]) == (mine, "0")
    assert set(environment) == set(settings())


def test_prefects_folder_is_there_before_prefect_looks_for_it(tmp_path):
    """Prefect warns when it cannot make it: it makes no parents."""
    code = "from flows.embedded import apply_settings; apply_settings(); import prefect.context"
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT")}
    environment = {**kept, "HEADRACE_HOME": str(tmp_path / "new" / "home")}
    done = subprocess.run(
        [sys.executable, "-W", "error:Failed to create", "-c", code], capture_output=True, text=True, env=environment
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "new" / "home" / "prefect").is_dir()


def test_a_folder_that_cannot_be_made_is_said(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"Prefect's folder .*file/prefect cannot be made: Not a directory"):
        apply_settings({"PREFECT_HOME": str(tmp_path / "file" / "prefect")})


def test_the_module_loads_no_prefect():
    code = "import sys, flows.embedded; print('prefect' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


@pytest.fixture
def environment(monkeypatch, tmp_path):
    """An environment of its own: what the code sets is gone after the test."""
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path))
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT")}
    monkeypatch.setattr(os, "environ", kept)
    return kept


def test_a_given_api_is_honoured_and_asked(environment):
    url = f"http://127.0.0.1:{free_port()}/api"
    environment["PREFECT_API_URL"] = url
    with pytest.raises(PrefectUnavailable, match=f"Prefect API at {url} does not answer") as caught, prefect_api():
        pytest.fail("nothing is begun")
    assert caught.value.retryable
    assert environment["PREFECT_API_URL"] == url


def test_a_given_api_of_another_kind_is_refused(environment):
    environment["PREFECT_API_URL"] = "ftp://x"
    with pytest.raises(ConfigError, match="PREFECT_API_URL"), prefect_api():
        pass


class _Stub:
    """Stands for the server's module: answers health, or ends at once."""

    HEALTHY = (
        "import http.server, sys\n"
        "class Handler(http.server.BaseHTTPRequestHandler):\n"
        "    def do_GET(self):\n"
        "        self.send_response(200); self.end_headers()\n"
        "http.server.HTTPServer(('127.0.0.1', int(sys.argv[sys.argv.index('--port') + 1])), Handler).serve_forever()\n"
    )
    BROKEN = "import sys\nprint('starting')\nsys.exit('no such table: flow_run')\n"


@pytest.fixture
def uvicorn(monkeypatch, tmp_path):
    def make(text: str) -> None:
        folder = tmp_path / "stub"
        folder.mkdir()
        (folder / "uvicorn.py").write_text(text)
        path = os.pathsep.join([str(folder), str(Path(__file__).parents[2])])
        os.environ["PYTHONPATH"] = path

    return make


def test_an_embedded_server_lives_as_long_as_the_block(environment, uvicorn):
    uvicorn(_Stub.HEALTHY)
    with prefect_api() as wait:
        wait()
        url = environment["PREFECT_API_URL"]
        host, port = url.split("/")[2].split(":")
        socket.create_connection((host, int(port)), 5).close()
    assert "PREFECT_API_URL" not in environment
    with pytest.raises(OSError, match="refused"):
        socket.create_connection((host, int(port)), 5)


def test_a_server_that_does_not_start_says_its_last_words(environment, uvicorn, tmp_path):
    uvicorn(_Stub.BROKEN)
    server = EmbeddedServer.start()
    with pytest.raises(HeadraceError, match="no such table: flow_run") as caught:
        server.wait()
    assert str(tmp_path / "prefect" / "server.log") in str(caught.value)


def test_a_server_that_never_answers_is_given_up(environment, uvicorn):
    uvicorn("import time\ntime.sleep(600)\n")
    server = EmbeddedServer.start()
    with pytest.raises(HeadraceError, match="no answer within"):
        server.wait(seconds=0.3)
    assert server._process.poll() is not None


def test_two_commands_do_not_make_the_first_database_together(environment, uvicorn, tmp_path):
    uvicorn(_Stub.HEALTHY)
    first = EmbeddedServer.start()
    second = []
    thread = threading.Thread(target=lambda: second.append(EmbeddedServer.start()))
    thread.start()
    thread.join(0.3)
    assert second == [], "the second waits while the first may be making the database"
    first.wait()
    thread.join(WAIT_SECONDS)
    second[0].wait()
    (tmp_path / "prefect" / "prefect.db").touch()
    third = EmbeddedServer.start()
    fourth = EmbeddedServer.start()
    for server in (first, second[0], third, fourth):
        server.stop()


def test_the_server_ends_when_the_command_is_killed(environment, uvicorn, tmp_path):
    uvicorn(_Stub.HEALTHY)
    code = (
        "import time\nfrom flows.embedded import EmbeddedServer\n"
        "server = EmbeddedServer.start(); server.wait(); print(server._process.pid, flush=True); time.sleep(600)\n"
    )
    command = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=dict(os.environ))
    assert command.stdout is not None
    server = int(command.stdout.readline())
    assert pid_alive(server)
    command.send_signal(signal.SIGKILL)
    command.wait()
    command.stdout.close()
    deadline = time.monotonic() + WAIT_SECONDS
    while pid_alive(server):
        assert time.monotonic() < deadline, "the server outlives the command"
        time.sleep(0.02)
