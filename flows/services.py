"""`headrace up`: Prefect with its pages, MLflow, the deployments and a worker on one state folder, in the foreground.

    up ─┬─ prefect     API and pages, on the same database as commands with a Prefect server of their own
        ├─ mlflow      the same database and artifact roots as commands without an MLflow server, on loopback
        ├─ worker ──── flow runs ── agent, torchrun, ranks
        └─ sweeper     ends what is left when `up` itself is killed

Children that die are started again. Everything ends with `up`, whatever ends it, and nothing else does.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from flows.command import stopped_by_signals
from flows.embedded import DATABASE_NAME, free_port
from flows.services_api import NoAnswer, answers, ask
from flows.services_file import ServicesRecord, only_up, remove_record, write_record
from flows.services_login import require_safe_host
from flows.services_marks import kill, mark_of, marked, send, top_flow_runs
from flows.services_process import ServiceProcess, environment_of_services, how, last_words
from headrace.environment import home, mlflow_database, prefect_home
from headrace.errors import ConfigError, HeadraceError
from headrace.process import machine_id
from headrace.terminal import Terminal
from headrace.tracking_address import server_answers, server_arguments
from tasks.child import command_of

START_SECONDS = 180.0
WATCH_SECONDS = 0.25
FLOW_SECONDS = 20.0
"""How long flow runs have to save and to say how they ended; all of `up` has thirty seconds."""

END_SECONDS = 3.0


@dataclass(frozen=True)
class Options:
    """Where the servers listen."""

    host: str = "127.0.0.1"
    port: int = 4200
    mlflow_port: int = 5000


def serve(options: Options, terminal: Terminal, on_live: Callable[[ServicesRecord], None]) -> None:
    """Start everything, call `on_live` once all of it answers, and keep it alive until a signal ends it.

    Raises ConfigError for a taken port, an open host without a login, or a second `up`, and HeadraceError when a part
    does not start or dies again and again.
    """
    require_own_servers()
    require_safe_host(options.host)
    with only_up() as (pid, started), stopped_by_signals():
        require_free_port(options.host, options.port, "--port")
        require_free_port("127.0.0.1", options.mlflow_port, "--mlflow-port")
        stack = Stack(options, pid, started, terminal)
        try:
            stack.start()
            on_live(stack.record())
            stack.watch()
        except KeyboardInterrupt:
            pass  # how it is ended
        finally:
            stack.stop()


def require_own_servers() -> None:
    """Refuse when the environment names other servers: what is started here would not be what is used."""
    for name in ("PREFECT_API_URL", "MLFLOW_TRACKING_URI"):
        if name in os.environ:
            raise ConfigError(
                f"{name} names a server, but `headrace up` starts its own for {home()}. Unset {name}, or use that "
                "server without `headrace up`: docs/operations.md says how to make the deployments there."
            )


def require_free_port(host: str, port: int, option: str) -> None:
    """Refuse a port that somebody listens on; 0 is always free."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"Port {port} of {host} cannot be used: {error.strerror}. Give another one with {option}, or 0 for any."
            ) from error


class Stack:
    """All processes of one `up`."""

    def __init__(self, options: Options, pid: int, started: int, terminal: Terminal) -> None:
        self._pid, self._started = pid, started
        self._terminal = terminal
        self._mark = mark_of(pid, started)
        self._since = datetime.now(UTC).isoformat(timespec="seconds")
        port, mlflow_port = options.port or free_port(), options.mlflow_port or free_port()
        host = f"[{options.host}]" if ":" in options.host else options.host
        self.ui = f"http://{host}:{port}"
        self.api = f"{self.ui}/api"
        self.mlflow = f"http://127.0.0.1:{mlflow_port}"
        self._environment = environment_of_services(self._mark, self.api, self.mlflow)
        prefect = ["prefect", "server", "start", "--host", options.host, "--port", str(port)]
        self._prefect = self._service("prefect", prefect, self.ui)
        self._mlflow = self._service("mlflow", ["mlflow", *server_arguments(mlflow_port)], self.mlflow)
        self._worker = self._service("worker", ["prefect", "worker", "start", *WORKER_OPTIONS, _worker_name()])
        self._services = (self._prefect, self._mlflow, self._worker)
        self._sweeper: subprocess.Popen[bytes] | None = None

    def _service(self, name: str, command: list[str], url: str | None = None) -> ServiceProcess:
        return ServiceProcess(name, command, self._environment, home() / "services" / f"{name}.log", url)

    # ------------------------------------------------------------------------------------------------------- start

    def start(self) -> None:
        """Start everything, and return when it answers."""
        first = not mlflow_database().exists() or not (prefect_home() / DATABASE_NAME).exists()
        more = " The first start makes their databases, which takes about 30 seconds." if first else ""
        self._terminal.note(f"Starting Prefect and MLflow on {home()}.{more}")
        mlflow_database().parent.mkdir(parents=True, exist_ok=True)
        self._start_sweeper()
        self._prefect.start()
        self._mlflow.start()
        self._wait(self._prefect, lambda: answers(f"{self.api}/health", 1.0))
        self._set_up()
        self._worker.start()
        self._wait(self._worker, self._worker_is_online)
        self._wait(self._mlflow, lambda: server_answers(self.mlflow, 1.0))
        self._wait(self._prefect, lambda: answers(f"{self.ui}/"))
        self._wait(self._mlflow, lambda: answers(f"{self.mlflow}/"))
        write_record(self.record())

    def _start_sweeper(self) -> None:
        arguments = [sys.executable, "-m", "flows.services_sweeper", str(self._pid), str(self._started)]
        self._sweeper = subprocess.Popen(
            arguments,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def _wait(self, service: ServiceProcess, is_there: Callable[[], bool]) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not is_there():
            code = service.exit_code()
            if code is not None or time.monotonic() > deadline:
                ended = how(code) if code is not None else f"no answer within {START_SECONDS:.0f} seconds"
                raise HeadraceError(
                    f"{service.name} did not start ({ended}): {last_words(service.log)}. Its log is {service.log}."
                )
            time.sleep(0.2)

    def _set_up(self) -> None:
        """Make the work pool, the deployments and the automations."""
        log = home() / "services" / "deployments.log"
        with log.open("wb") as output:
            done = subprocess.run(
                # Flow runs work in this folder, so that a relative path means the same as in a command given here.
                command_of("flows.services_setup", str(Path.cwd())),
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                timeout=START_SECONDS,
            )
        if done.returncode:
            raise HeadraceError(f"The deployments could not be made: {last_words(log)}. The log is {log}.")

    def _worker_is_online(self) -> bool:
        try:
            workers = ask(f"{self.api}/work_pools/headrace/workers/filter", {}, seconds=2.0)
        except NoAnswer:
            return False
        return any(
            worker["name"] == _worker_name() and str(worker["last_heartbeat_time"]) >= self._worker.since[:19]
            for worker in workers
        )

    def record(self) -> ServicesRecord:
        """What others have to know."""
        return ServicesRecord(
            machine=machine_id(),
            pid=self._pid,
            start_time=self._started,
            since=self._since,
            prefect_api=self.api,
            prefect_ui=self.ui,
            mlflow=self.mlflow,
            services=tuple(service.record() for service in self._services),
        )

    # ------------------------------------------------------------------------------------------------------- watch

    def watch(self) -> None:
        """Start again what dies, until a signal comes. Raises HeadraceError when one dies again and again."""
        while True:
            for service in self._services:
                self._look_after(service)
            if self._sweeper is not None and self._sweeper.poll() is not None:
                self._start_sweeper()
            time.sleep(WATCH_SECONDS)

    def _look_after(self, service: ServiceProcess) -> None:
        if service.due is not None:
            if time.monotonic() < service.due:
                return
            if service is self._worker and not answers(f"{self.api}/health", 1.0):
                return  # it would only end again
            service.start()
            write_record(self.record())
            self._terminal.note(f"{service.name} is started again (process {service.pid}).")
            return
        code = service.exit_code()
        if code is not None:
            delay = service.plan_restart(self._mark)
            self._terminal.note(f"{service.name} died ({how(code)}); it is started again in {delay:.0f} s.")

    # -------------------------------------------------------------------------------------------------------- stop

    def stop(self) -> None:
        """End everything: flow runs and the worker first, the servers that they report to last."""
        try:
            self._stop_in_order()
        except KeyboardInterrupt:
            self._terminal.note("Ending at once.")
        finally:
            kill(self._mark)
            for service in self._services:
                service.wait(time.monotonic() + END_SECONDS)
            remove_record(self._pid, self._started)
            if self._sweeper is not None:
                self._sweeper.kill()
                self._sweeper.wait()

    def _stop_in_order(self) -> None:
        self._worker.terminate()
        runs = top_flow_runs(self._mark)
        if runs:
            self._terminal.note(f"Ending {len(runs)} flow runs, which save first; once more to end at once.")
        send(runs, self._mark, signal.SIGTERM)
        deadline = time.monotonic() + FLOW_SECONDS
        while marked(self._mark, flow_runs=True) and time.monotonic() < deadline:
            time.sleep(0.1)
        self._worker.wait(min(deadline, time.monotonic() + END_SECONDS))
        kill(self._mark, "worker")
        self._mlflow.terminate()
        self._prefect.terminate()
        deadline = time.monotonic() + END_SECONDS
        for service in (self._mlflow, self._prefect):
            service.wait(deadline)


WORKER_OPTIONS = ["--pool", "headrace", "--type", "process", "--install-policy", "never", "--name"]


def _worker_name() -> str:
    return f"up-{socket.gethostname()}"
