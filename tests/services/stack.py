"""`headrace up` as a user starts it, on a state folder of its own and on free ports, and ways to kill parts of it."""

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from uuid import UUID

import psutil
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import FlowRun

from tests.chaos.harness import COMMAND, Lab

START_SECONDS = 240.0
RUN_SECONDS = 300.0
DOWN_SECONDS = 45.0

T = TypeVar("T")


def until(question: Callable[[], T], what: str, seconds: float = RUN_SECONDS) -> T:
    """The first answer that is true. Fails when there is none in time."""
    deadline = time.monotonic() + seconds
    while not (answer := question()):
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.1)
    return answer


@dataclass
class Up:
    """One `headrace up`; `document` is what it printed when all of it was live."""

    lab: Lab
    process: "subprocess.Popen[str]"
    errors: Path
    document: dict[str, Any] = field(default_factory=dict)

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def prefect_api(self) -> str:
        return str(self.document["prefect_api"])

    @property
    def mlflow(self) -> str:
        return str(self.document["mlflow"])

    @property
    def env(self) -> dict[str, str]:
        """The environment of a command on the same state folder."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("HEADRACE_", "MLFLOW_", "PREFECT_"))}
        return {**kept, "HEADRACE_HOME": str(self.lab.home), "OMP_NUM_THREADS": "1", **self.lab.environment}

    def client(self) -> SyncPrefectClient:
        return SyncPrefectClient(self.prefect_api)

    def said(self) -> str:
        """What it wrote on stderr so far."""
        return self.errors.read_text(encoding="utf-8")

    def status(self) -> dict[str, Any]:
        done = self.lab.command("status", "--json")
        document: dict[str, Any] = json.loads(done.stdout)
        assert done.returncode == (0 if document["live"] else 1)
        return document

    def service(self, name: str) -> dict[str, Any]:
        """A service as `services.json` has it now."""
        record = json.loads((self.lab.home / "services.json").read_text(encoding="utf-8"))
        (found,) = [service for service in record["services"] if service["name"] == name]
        return found  # type: ignore[no-any-return] # JSON

    def kill(self, name: str) -> int:
        """Kill the process of a service; returns its id."""
        pid = int(self.service(name)["pid"])
        os.kill(pid, signal.SIGKILL)
        return pid

    def run_deployment(self, name: str, config: dict[str, Any], environment: dict[str, str] | None = None) -> UUID:
        """Ask for a run through the API, as the form does; returns the id of the flow run."""
        variables = {"env": environment} if environment else None
        with self.client() as client:
            deployment = client.read_deployment_by_name(name)
            return client.create_flow_run_from_deployment(
                deployment.id, parameters={"config": config}, job_variables=variables
            ).id

    def flow_run(self, flow_run: UUID) -> FlowRun:
        with self.client() as client:
            return client.read_flow_run(flow_run)

    def state(self, flow_run: UUID) -> str:
        return str(self.flow_run(flow_run).state_name)

    def ended(self, flow_run: UUID) -> str:
        """Name of the state in which a flow run ended, after waiting for it."""

        def final() -> str | None:
            state = self.flow_run(flow_run).state
            return str(state.name) if state is not None and state.is_final() else None

        return str(until(final, f"the flow run {flow_run} ends"))

    def processes(self) -> list[psutil.Process]:
        """Every live process on this state folder."""
        return self.lab.processes()


@contextlib.contextmanager
def started_up(lab: Lab, *arguments: str, command: Sequence[str] = COMMAND, folder: Path | None = None) -> Iterator[Up]:
    """`headrace up` on the state folder of `lab`, live; ended with the block if it still runs, with all it started.

    `command` is how headrace is called, and `folder` where; here by default.
    """
    lab.folder.mkdir(parents=True, exist_ok=True)
    errors = lab.folder / f"up-{time.monotonic_ns()}.log"
    with errors.open("wb") as output:
        process = subprocess.Popen(
            [*command, "up", "--port", "0", "--mlflow-port", "0", "--json", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=output,
            text=True,
            env=Up(lab, None, errors).env,  # type: ignore[arg-type] # only its environment
            cwd=folder,
        )
    up = Up(lab, process, errors)
    try:
        up.document = _first_document(up)
        yield up
    finally:
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(DOWN_SECONDS)
        if process.poll() is None:
            process.kill()
            process.wait()
        assert process.stdout is not None
        process.stdout.close()
        lab.assert_no_orphans()


def _first_document(up: Up) -> dict[str, Any]:
    assert up.process.stdout is not None
    lines: list[str] = []
    for line in up.process.stdout:
        lines.append(line)
        if line == "}\n":
            document: dict[str, Any] = json.loads("".join(lines))
            assert "prefect_api" in document, f"it failed: {document}\n{up.said()}"
            return document
    raise AssertionError(f"`headrace up` ended with {up.process.wait()}:\n{up.said()}")
