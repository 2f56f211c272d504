"""`headrace up`, `status` and `down` without their servers: refusals, records, locks, restarts, marks."""

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from flows import services_file, services_process
from flows.cli import execute
from flows.embedded import EmbeddedServer
from flows.services import Options, require_free_port, serve
from flows.services_file import (
    ServiceRecord,
    ServicesDown,
    ServicesRecord,
    alone_with_embedded_server,
    holder,
    live_record,
    only_up,
    read_record,
    remove_record,
    using_services,
    write_record,
)
from flows.services_login import require_safe_host
from flows.services_marks import FLOW_RUN, SERVICE, UP, kill, mark_of, marked, top_flow_runs
from flows.services_process import ServiceProcess, environment_of_services
from flows.services_status import down, status
from headrace.errors import ConfigError, HeadraceError
from headrace.process import machine_id, pid_alive, start_time
from headrace.terminal import Terminal

WAIT_SECONDS = 30


@pytest.fixture
def home(tmp_path, monkeypatch):
    folder = tmp_path / "home"
    folder.mkdir()
    monkeypatch.setenv("HEADRACE_HOME", str(folder))
    for name in [name for name in os.environ if name.startswith(("PREFECT_", "MLFLOW_"))]:
        monkeypatch.delenv(name)
    return folder


@pytest.fixture
def server():
    """A server that answers everything with success; gives its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *arguments):
            pass

    made = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=made.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{made.server_port}"
    made.shutdown()
    thread.join()
    made.server_close()


def record_of(url, pid=None, started=None, services=()):
    return ServicesRecord(
        machine=machine_id(),
        pid=pid or os.getpid(),
        start_time=started or start_time(pid or os.getpid()),
        since="2026-11-30T06:00:00+00:00",
        prefect_api=f"{url}/api",
        prefect_ui=url,
        mlflow=url,
        services=services,
    )


# --------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("name", ["PREFECT_API_URL", "MLFLOW_TRACKING_URI"])
def test_servers_of_the_environment_are_not_started_again(home, monkeypatch, name):
    monkeypatch.setenv(name, "http://127.0.0.1:9")
    with pytest.raises(ConfigError, match=name):
        serve(Options(), Terminal(), lambda record: None)


@pytest.mark.parametrize("host", ["192.0.2.7", "example.org"])
def test_an_open_host_needs_a_login(home, monkeypatch, host):
    with pytest.raises(ConfigError, match="PREFECT_SERVER_API_AUTH_STRING"):
        require_safe_host(host)
    monkeypatch.setenv("PREFECT_SERVER_API_AUTH_STRING", "me:canary-in-a-cage")
    require_safe_host(host)


@pytest.mark.parametrize(
    ("login", "fault"),
    [
        ("canary", "is not of the form"),
        (":canary-in-a-cage", "is not of the form"),
        ("me:", "is not of the form"),
        ("me:canary", "has a password of 6 characters"),
        ("admin:password1234", "that everybody tries"),  # MLflow's own
        ("admin:adminadminadmin", "that everybody tries"),
        ("me:mememememememe", "that everybody tries"),
    ],
)
def test_a_login_that_keeps_nobody_out_is_refused_and_not_repeated(home, monkeypatch, login, fault):
    monkeypatch.setenv("PREFECT_SERVER_API_AUTH_STRING", login)
    with pytest.raises(ConfigError, match=fault) as refused:
        require_safe_host("192.0.2.7")
    assert login not in str(refused.value)


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_a_host_that_no_browser_can_open_is_refused_also_with_a_login(home, monkeypatch, host):
    monkeypatch.setenv("PREFECT_SERVER_API_AUTH_STRING", "me:canary")
    with pytest.raises(ConfigError, match="no address that a browser can open"):
        require_safe_host(host)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "localhost", "::1"])
def test_loopback_needs_none(home, host):
    require_safe_host(host)


def test_a_taken_port_is_one_sentence_with_its_option(home):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"Port {port} of 127.0.0.1 cannot be used: .* --mlflow-port"):
            require_free_port("127.0.0.1", port, "--mlflow-port")
    require_free_port("127.0.0.1", 0, "--port")


def test_the_login_reaches_the_clients_and_no_record(home, monkeypatch):
    monkeypatch.setenv("PREFECT_SERVER_API_AUTH_STRING", "me:canary-login")
    environment = environment_of_services("1.2", "http://x/api", "http://y")
    assert environment["PREFECT_API_AUTH_STRING"] == "me:canary-login"
    write_record(record_of("http://x"))
    assert "canary" not in (home / "services.json").read_text()


def test_flow_runs_are_told_where_everything_is_and_to_send_heartbeats(home):
    environment = environment_of_services("1.2", "http://x/api", "http://y")
    assert environment["HEADRACE_HOME"] == str(home)
    assert environment["PREFECT_API_URL"] == "http://x/api"
    assert environment["MLFLOW_TRACKING_URI"] == "http://y"
    assert environment["PREFECT_SERVER_ANALYTICS_ENABLED"] == "false"
    assert environment["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"] == "30"
    assert environment["PREFECT_HOME"] == f"{home}/prefect"


# ----------------------------------------------------------------------------------------------- the record, the lock


def test_the_record_is_for_this_user_and_removed_only_by_who_wrote_it(home):
    assert read_record() is None
    record = record_of("http://x")
    write_record(record)
    assert read_record() == live_record() == record
    assert stat.S_IMODE((home / "services.json").stat().st_mode) == 0o600
    remove_record(record.pid, record.start_time + 1)
    assert read_record() == record
    remove_record(record.pid, record.start_time)
    assert read_record() is None


def test_the_record_of_a_killed_one_is_not_believed(home):
    gone = subprocess.Popen(["sleep", "60"])
    started = start_time(gone.pid)
    gone.kill()
    gone.wait()
    write_record(record_of("http://x", gone.pid, started))
    assert live_record() is None
    with using_services(Terminal(), prefect=True) as found:
        assert found is None
        assert "PREFECT_API_URL" not in os.environ


def test_a_damaged_record_is_one_sentence(home):
    (home / "services.json").write_text("{")
    with pytest.raises(HeadraceError, match=r"services\.json cannot be read"):
        read_record()


def test_commands_use_the_servers_of_a_live_one_unless_others_are_named(home, server, monkeypatch):
    write_record(record_of(server))
    with using_services():
        assert os.environ["MLFLOW_TRACKING_URI"] == server
        assert "PREFECT_API_URL" not in os.environ
    with using_services(prefect=True):
        assert os.environ["PREFECT_API_URL"] == f"{server}/api"
    assert "PREFECT_API_URL" not in os.environ
    assert "MLFLOW_TRACKING_URI" not in os.environ
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://mine")
    with using_services():
        assert os.environ["MLFLOW_TRACKING_URI"] == "http://mine"


def test_a_live_one_whose_server_is_silent_is_said(home, monkeypatch):
    monkeypatch.setattr(services_file, "ANSWER_SECONDS", 0.2)
    write_record(record_of("http://127.0.0.1:9"))
    with pytest.raises(ServicesDown, match=r"127\.0\.0\.1:9 does not answer"), using_services():
        pass


def test_a_command_waits_for_one_that_is_starting(home, server, capfd):
    with only_up() as (pid, started):
        assert holder() == (pid, started)
        threading.Timer(0.5, lambda: write_record(record_of(server))).start()
        with using_services(Terminal(plain=True), prefect=True) as found:
            assert found is not None
    assert "is starting on this state folder; waiting" in capfd.readouterr().err
    assert holder() is None


def test_a_second_one_is_told_which_the_first_is(home):
    code = (
        "import time\nfrom flows.services_file import only_up\n"
        "with only_up() as (pid, _): print(pid, flush=True); time.sleep(600)\n"
    )
    first = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        pid = int(first.stdout.readline())
        with pytest.raises(ConfigError, match=rf"runs already on .*process {pid}"), only_up():
            pass
        with pytest.raises(ServicesDown, match="is starting"):
            EmbeddedServer.start()
    finally:
        first.kill()
        first.wait()
        first.stdout.close()
    with only_up():
        pass


def test_commands_with_servers_of_their_own_keep_it_out_and_not_each_other(home):
    first, second = alone_with_embedded_server(), alone_with_embedded_server()
    with pytest.raises(ConfigError, match="a Prefect server of its own"), only_up():
        pass
    first.release()
    with pytest.raises(ConfigError, match="a Prefect server of its own"), only_up():
        pass
    second.release()
    with only_up(), pytest.raises(ServicesDown):
        alone_with_embedded_server()


# ------------------------------------------------------------------------------------------------ marks and restarts


def sleeper(**variables):
    return subprocess.Popen(["sleep", "600"], env={**os.environ, **variables})


def test_what_was_started_is_found_by_its_mark_and_nothing_else_is_touched():
    mark = mark_of(os.getpid(), 7)
    mlflow = sleeper(**{UP: mark, SERVICE: "mlflow"})
    worker = sleeper(**{UP: mark, SERVICE: "worker"})
    run = sleeper(**{UP: mark, SERVICE: "worker", FLOW_RUN: "x"})
    foreign = sleeper(**{UP: mark_of(os.getpid(), 8), SERVICE: "mlflow"})
    everything = [mlflow, worker, run, foreign]
    try:
        deadline = time.monotonic() + WAIT_SECONDS
        while len(marked(mark)) < 3:
            assert time.monotonic() < deadline
        assert marked(mark, "mlflow") == [mlflow.pid]
        assert marked(mark, "worker", flow_runs=False) == [worker.pid]
        assert top_flow_runs(mark) == [run.pid]
        assert kill(mark, "worker", flow_runs=False)
        assert [process.poll() for process in everything] == [None, -9, None, None]
        assert kill(mark)
        assert [process.wait(WAIT_SECONDS) for process in everything[:3]] == [-9, -9, -9]
        assert foreign.poll() is None
    finally:
        for process in everything:
            process.kill()
            process.wait()


@pytest.fixture
def service(home, monkeypatch, tmp_path):
    """A service that runs a module which is written by the test."""
    folder = tmp_path / "stub"
    folder.mkdir()

    def make(text):
        (folder / "stub.py").write_text(text)
        path = os.pathsep.join([str(folder), str(Path(__file__).parents[2])])
        environment = {**os.environ, UP: mark_of(os.getpid(), 7), "PYTHONPATH": path}
        return ServiceProcess("worker", ["stub"], environment, tmp_path / "stub.log", None)

    return make


def test_a_service_that_dies_is_started_again_ever_later_and_not_for_ever(service, monkeypatch):
    monkeypatch.setattr(services_process, "DELAYS", (0.0, 0.0))
    dying = service("import sys\nprint('out of luck')\nsys.exit(7)\n")
    for _ in range(2):
        dying.start()
        assert dying.wait(time.monotonic() + WAIT_SECONDS)
        assert dying.exit_code() == 7
        assert dying.plan_restart(mark_of(os.getpid(), 7)) == 0.0
        assert dying.due is not None
    dying.start()
    assert dying.wait(time.monotonic() + WAIT_SECONDS)
    with pytest.raises(
        HeadraceError, match=r"worker died 3 times in a row, the last time with exit code 7\. .*stub\.log"
    ):
        dying.plan_restart(mark_of(os.getpid(), 7))
    assert services_process.last_words(dying.log) == "out of luck"


def test_a_death_after_a_long_life_counts_as_the_first(service, monkeypatch):
    monkeypatch.setattr(services_process, "STEADY_SECONDS", 0.0)
    dying = service("")
    for _ in range(len(services_process.DELAYS) + 2):
        dying.start()
        assert dying.wait(time.monotonic() + WAIT_SECONDS)
        assert dying.plan_restart(mark_of(os.getpid(), 7)) == services_process.DELAYS[0]


def test_what_a_dead_service_left_is_ended_before_it_is_started_again(service):
    parent = service(
        "import os, subprocess, time\n"
        "child = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        "print(child.pid, flush=True)\ntime.sleep(600)\n"
    )
    parent.start()
    deadline = time.monotonic() + WAIT_SECONDS
    while not parent.log.read_text().endswith("\n"):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    child = int(parent.log.read_text())
    os.kill(parent.pid, signal.SIGKILL)
    assert parent.wait(time.monotonic() + WAIT_SECONDS)
    assert pid_alive(child)
    parent.plan_restart(mark_of(os.getpid(), 7))
    assert not pid_alive(child)


# ---------------------------------------------------------------------------------------------------- status and down


def test_status_and_down_when_nothing_runs(home, capfd):
    assert status()["live"] is False
    assert execute(["status"]) == 1
    assert f"does not run on {home}" in capfd.readouterr().err
    assert execute(["status", "--json"]) == 1
    assert json.loads(capfd.readouterr().out)["up"] is None
    assert execute(["down"]) == 0
    assert "nothing was ended" in capfd.readouterr().err
    assert list(home.iterdir()) == []


def test_down_ends_what_a_killed_one_left_and_takes_its_record_away(home):
    gone = subprocess.Popen(["sleep", "60"])
    started = start_time(gone.pid)
    left = sleeper(**{UP: mark_of(gone.pid, started), SERVICE: "mlflow"})
    other = sleeper()
    gone.kill()
    gone.wait()
    services = tuple(
        ServiceRecord(name=name, pid=p.pid, start_time=start_time(p.pid), since="", url=None, log="")
        for name, p in (("mlflow", left), ("worker", other))
    )
    write_record(record_of("http://x", gone.pid, started, services))
    try:
        deadline = time.monotonic() + WAIT_SECONDS
        while not marked(mark_of(gone.pid, started)):
            assert time.monotonic() < deadline
        assert down()["ended"] == [{"name": "mlflow", "pid": left.pid}]
        assert left.wait(WAIT_SECONDS) == -9
        assert other.poll() is None, "a process without the mark is not ours"
        assert read_record() is None
    finally:
        for process in (left, other):
            process.kill()
            process.wait()
