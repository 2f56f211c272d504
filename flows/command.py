"""What the heavy commands do: run the pipeline, continue a text, serve MLflow's pages."""

import contextlib
import importlib
import logging
import os
import signal
import subprocess
import sys
import time
import webbrowser
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

from flows.config import PipelineConfig, require_vocabulary
from flows.embedded import free_port, prefect_api
from flows.result import PretrainResult
from flows.services_file import live_record, using_services
from headrace.environment import PACKAGES, mlflow_database
from headrace.errors import Cancelled, HeadraceError
from headrace.terminal import Terminal
from tasks.child import command_of

UI_SECONDS = 120


def run_pipeline(config: PipelineConfig, terminal: Terminal) -> PretrainResult:
    """Run the flow on this config, with its progress on `terminal`.

    Raises what the flow raises, and Cancelled when it was stopped by a signal.
    """
    show_logs(terminal)
    check_inputs(config)
    with stopped_by_signals(), using_services(terminal, prefect=True), prefect_api() as wait:
        if not mlflow_database().exists() and "MLFLOW_TRACKING_URI" not in os.environ:
            terminal.note("First start: MLflow and Prefect make their databases, which takes about 20 seconds.")
        # The server starts meanwhile, on another core; and what MLflow has to say is said before that takes long.
        from prefect.exceptions import CancelledRun, TerminationSignal

        from flows.pretrain_flow import pretrain
        from headrace.tracking import Tracker
        from tasks.console import showing_on

        Tracker.connect()
        wait()
        with showing_on(terminal):
            try:
                return pretrain(config)
            except CancelledRun as stopped:
                raise Cancelled(str(stopped)) from None
            except TerminationSignal:
                raise Cancelled("Stopped. The same command continues from what is committed.") from None


def check_inputs(config: PipelineConfig) -> None:
    """Refuse what no server is needed to see: no text, a wrong tokenizer, a vocabulary that the model cannot hold.

    Raises InputError and ConfigError.
    """
    from data_prep.sources import require_text
    from data_prep.tokenizers import read_given

    require_text(config.data.inputs)
    if config.tokenizer.path is not None:
        given, _ = read_given(config.tokenizer)
        require_vocabulary(config, given.vocab_size)


def continue_text(model: str, prompt: str) -> tuple[Path, str]:
    """The folder of the model, and what it writes after `prompt`. Refuses what is no model before torch is loaded."""
    from flows.look import model_folder
    from training.export.folder import require_model

    folder = model_folder(model)
    require_model(folder)
    # By name: everything else in this package starts without torch.
    opened = importlib.import_module("training.generate").open_model(folder)
    return folder, str(opened.complete(prompt, max_new_tokens=64))


def serve_pages(port: int, terminal: Terminal, on_page: Callable[[str], None]) -> None:
    """Serve the default database on loopback until Ctrl-C, and give its page to `on_page`.

    With MLFLOW_TRACKING_URI on a server, or beside a running `headrace up`, only the page is given.
    """
    from headrace.tracking_address import (
        PAGE_QUERY,
        default_uri,
        is_server,
        redact,
        require_answer,
    )

    record = live_record()
    if record is not None and "MLFLOW_TRACKING_URI" not in os.environ:
        with using_services(terminal):
            terminal.note(f"MLflow is served by `headrace up` (process {record.pid}).")
            on_page(record.mlflow_page)
            open_on_screen(record.mlflow_page)
        return
    uri = default_uri()
    if is_server(uri):
        require_answer(uri)
        page = f"{redact(uri).rstrip('/')}/#/experiments{PAGE_QUERY}"
        terminal.note("MLflow runs already.")
        on_page(page)
        return
    with stopped_by_signals(), contextlib.suppress(KeyboardInterrupt):  # how a server is ended
        _serve(port, terminal, on_page)


def _serve(port: int, terminal: Terminal, on_page: Callable[[str], None]) -> None:
    from headrace.tracking_address import PAGE_QUERY, SERVER_SETTINGS, server_arguments

    mlflow_database().parent.mkdir(parents=True, exist_ok=True)
    port = port or free_port()
    log = mlflow_database().with_name("ui.log")
    with log.open("wb") as output:
        server = subprocess.Popen(
            command_of("mlflow", *server_arguments(port), end=signal.SIGTERM),
            env={**os.environ, **SERVER_SETTINGS},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            # A group of its own: what it has started ends with it, and Ctrl-C reaches it through `_end` alone.
            start_new_session=True,
        )
    page = f"http://127.0.0.1:{port}/#/experiments{PAGE_QUERY}"
    try:
        with terminal.waiting("Starting MLflow's server ..."):
            _wait_for(server, f"http://127.0.0.1:{port}", log)
        terminal.note("MLflow is served until Ctrl-C.")
        on_page(page)
        open_on_screen(page)
        server.wait()
    finally:
        _end(server)


def open_on_screen(page: str) -> None:
    """Open the page when somebody sits before a screen: a browser inside the terminal would take the terminal away."""
    if not sys.stdout.isatty():
        return
    try:
        browser = webbrowser.get()
    except webbrowser.Error:
        return  # there is none
    if isinstance(browser, webbrowser.BackgroundBrowser | webbrowser.UnixBrowser):
        browser.open(page)


def _wait_for(server: "subprocess.Popen[bytes]", uri: str, log: Path) -> None:
    from headrace.tracking_address import server_answers

    deadline = time.monotonic() + UI_SECONDS
    while not server_answers(uri, timeout=1.0):
        if server.poll() is not None or time.monotonic() > deadline:
            raise HeadraceError(f"MLflow's server did not start; its log is {log}. Is the port free? See --port.")
        time.sleep(0.2)


def _end(server: "subprocess.Popen[bytes]") -> None:
    if server.poll() is None:
        server.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(5)
    with contextlib.suppress(ProcessLookupError):  # nothing is left
        os.killpg(server.pid, signal.SIGKILL)
    server.wait()


def show_logs(terminal: Terminal) -> None:
    """Warnings of our own packages appear above the live bars; what other libraries say is for their developers."""
    handler = terminal.log_handler()
    for name in PACKAGES:
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.setLevel(logging.WARNING)
        logger.propagate = False


@contextlib.contextmanager
def stopped_by_signals() -> Iterator[None]:
    """Within the block SIGTERM and a closed terminal do what Ctrl-C does: children end first, then the command.

    Ctrl-C itself is set, too: a shell that starts a command in the background has it ignored.
    """
    before = {number: signal.signal(number, _interrupt) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
