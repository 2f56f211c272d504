"""The heavy commands: logs, signals, and the pages of MLflow."""

import io
import logging
import os
import signal
import subprocess
import sys
import time
import webbrowser
from types import SimpleNamespace

import pytest

from flows.command import open_on_screen, serve_pages, show_logs, stopped_by_signals
from headrace.errors import HeadraceError, TrackingUnavailable
from headrace.process import pid_alive
from headrace.terminal import Terminal
from tests.mlflow_database import NOLOAD

pytestmark = pytest.mark.filterwarnings(NOLOAD)


@pytest.fixture
def terminal():
    return Terminal(plain=True, stream=io.StringIO())


@pytest.fixture
def _own_loggers():
    names = ("data_prep", "flows", "headrace", "tasks", "training")
    before = {name: (logging.getLogger(name).handlers, logging.getLogger(name).level) for name in names}
    yield
    for name, (handlers, level) in before.items():
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = handlers, True
        logger.setLevel(level)


@pytest.mark.usefixtures("_own_loggers")
def test_our_warnings_appear_on_the_terminal_once(terminal):
    for _ in range(2):
        show_logs(terminal)
    logging.getLogger("tasks.train").warning("an attempt %d", 3)
    logging.getLogger("tasks.train").info("a detail")
    logging.getLogger("urllib3").warning("a retry")
    text = terminal._console.file.getvalue()
    assert text.count("an attempt 3") == 1
    assert "a detail" not in text
    assert "a retry" not in text


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_every_way_to_stop_is_an_interrupt(number):
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt), stopped_by_signals():
        os.kill(os.getpid(), number)
    assert signal.getsignal(number) is before


def test_a_server_that_is_named_and_away_is_said(monkeypatch, terminal):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:secret@127.0.0.1:9")
    with pytest.raises(TrackingUnavailable, match=r"http://\*\*\*@127.0.0.1:9 does not answer"):
        serve_pages(0, terminal, lambda page: None)


@pytest.fixture
def stub_mlflow(monkeypatch, tmp_path):
    """`stub_mlflow(text)`: the children that serve pages run this instead of MLflow."""
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)

    def make(text: str) -> None:
        path = tmp_path / "stub.py"
        path.write_text(text)
        stub = [sys.executable, str(path)]
        monkeypatch.setattr("flows.command.command_of", lambda _, *arguments, end: [*stub, *arguments])

    return make


HEALTHY = (
    "import http.server, sys\n"
    "class Handler(http.server.BaseHTTPRequestHandler):\n"
    "    def do_GET(self): self.send_response(200); self.end_headers()\n"
    "http.server.HTTPServer(('127.0.0.1', int(sys.argv[sys.argv.index('--port') + 1])), Handler).serve_forever()\n"
)


def test_pages_are_served_until_ctrl_c(stub_mlflow, terminal, monkeypatch):
    stub_mlflow(HEALTHY)
    pages, started = [], []
    real = subprocess.Popen
    monkeypatch.setattr("flows.command.subprocess.Popen", lambda *a, **k: started.append(real(*a, **k)) or started[-1])

    def seen(page: str) -> None:
        pages.append(page)
        os.kill(os.getpid(), signal.SIGINT)

    serve_pages(0, terminal, seen)
    assert pages[0].startswith("http://127.0.0.1:")
    assert pages[0].endswith("/#/experiments?workflowType=machine_learning")
    assert started[0].poll() is not None


def test_a_stop_during_the_start_ends_all_that_was_started(stub_mlflow, terminal, monkeypatch, tmp_path):
    """The server of a start that takes long, and a child of it that ends for nobody."""
    stub_mlflow(
        "import pathlib, subprocess, sys, time\n"
        "code = 'import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); '\n"
        "code += 'time.sleep(600)'\n"
        "child = subprocess.Popen([sys.executable, '-c', code], stdout=subprocess.PIPE)\n"
        "child.stdout.readline()\n"
        f"pathlib.Path({str(tmp_path / 'pid')!r}).write_text(f'{{child.pid}}')\n"
        "time.sleep(600)\n"
    )

    def no_answer(*_, **__):
        if (tmp_path / "pid").exists() and (tmp_path / "pid").read_text():
            os.kill(os.getpid(), signal.SIGTERM)
        return False

    monkeypatch.setattr("headrace.tracking_address.server_answers", no_answer)
    serve_pages(0, terminal, lambda page: pytest.fail("no page"))
    assert wait_until_gone(int((tmp_path / "pid").read_text()))


def wait_until_gone(pid: int) -> bool:
    """The kernel may need a moment to end a process that was killed."""
    deadline = time.monotonic() + 30
    while pid_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not pid_alive(pid)


@pytest.mark.parametrize(
    ("terminal_is_one", "browser", "opened"),
    [
        (True, webbrowser.BackgroundBrowser, ["the page"]),
        (False, webbrowser.BackgroundBrowser, []),
        (True, webbrowser.GenericBrowser, []),
        (True, None, []),
    ],
    ids=["screen", "pipe", "browser in the terminal", "no browser"],
)
def test_a_page_is_opened_only_before_a_screen(monkeypatch, terminal_is_one, browser, opened):
    pages = []

    def get():
        if browser is None:
            raise webbrowser.Error("could not locate runnable browser")
        found = browser("a-browser")
        monkeypatch.setattr(found, "open", pages.append)
        return found

    monkeypatch.setattr("flows.command.webbrowser.get", get)
    monkeypatch.setattr("sys.stdout", SimpleNamespace(isatty=lambda: terminal_is_one))
    open_on_screen("the page")
    assert pages == opened


def test_a_server_that_does_not_start_names_its_log(stub_mlflow, terminal, tmp_path):
    stub_mlflow("import sys\nsys.exit('the port is taken')\n")
    with pytest.raises(HeadraceError, match=str(tmp_path / "home" / "ui.log")):
        serve_pages(0, terminal, lambda page: pytest.fail("no page"))
    assert "the port is taken" in (tmp_path / "home" / "ui.log").read_text()
