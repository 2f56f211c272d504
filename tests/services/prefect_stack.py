"""A real Prefect server, a real process worker, and deployments of the real flows, each with a state folder of its own.

Every process asks the kernel to be killed with the test process; the server can be killed and started again on its
port, the worker too.
"""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from uuid import UUID

import psutil
import pytest
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import DeploymentScheduleCreate, WorkPoolCreate
from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterId
from prefect.client.schemas.objects import FlowRun
from prefect.client.schemas.schedules import IntervalSchedule
from prefect.client.schemas.sorting import FlowRunSort
from prefect.utilities.callables import parameter_schema

from flows.deployments import deployments
from flows.embedded import free_port, settings
from flows.pretrain_flow import pretrain
from flows.reconcile_flow import reconcile
from tasks.child import command_of
from tests.chaos.harness import COMMAND, ORPHAN_SECONDS, Lab

POOL = "tests"
START_SECONDS = 180.0
SECONDS = 240.0
"""For anything that a run does: starting a process takes ten seconds on a busy machine."""

SLOW_STEPS = {"point": "step.middle", "action": "sleep", "seconds": 0.5, "always": True}

T = TypeVar("T")


def until(question: Callable[[], T], what: str, seconds: float = SECONDS) -> T:
    """The first answer that is true. Fails when there is none in time."""
    deadline = time.monotonic() + seconds
    while not (answer := question()):
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.2)
    return answer


@dataclass
class Stack:
    """One server and one worker."""

    folder: Path
    port: int = field(default_factory=free_port)
    server: "subprocess.Popen[bytes] | None" = None
    worker: "subprocess.Popen[bytes] | None" = None
    commands: "list[subprocess.Popen[str]]" = field(default_factory=list)

    @property
    def api(self) -> str:
        return f"http://127.0.0.1:{self.port}/api"

    @property
    def environment(self) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("HEADRACE_", "MLFLOW_", "PREFECT_"))}
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("HEADRACE_HOME", str(self.folder))
            ours = settings()
        return {
            **kept,
            **ours,
            "PREFECT_API_URL": self.api,
            "PREFECT_UI_ENABLED": "0",
            "PREFECT_WORKER_QUERY_SECONDS": "1",
            "PREFECT_WORKER_HEARTBEAT_SECONDS": "2",  # Prefect believes in a worker for three of them
            "PREFECT_LOGGING_LEVEL": "INFO",
            "OMP_NUM_THREADS": "1",
        }

    def _start(self, name: str, *command: str) -> "subprocess.Popen[bytes]":
        with (self.folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                command_of(*command),
                env=self.environment,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def start_server(self) -> None:
        app = "prefect.server.api.server:create_app"
        options = ["--factory", app, "--host", "127.0.0.1", "--port", str(self.port), "--log-level", "error"]
        self.server = self._start("server", "uvicorn", *options)
        with self.client() as client:
            until(lambda: client.api_healthcheck() is None, "the server answers", START_SECONDS)

    def start_worker(self) -> None:
        self.worker = self._start("worker", "prefect", "worker", "start", "--pool", POOL, "--type", "process")

        def polls() -> bool:
            with self.client() as client:
                workers = client.read_workers_for_work_pool(POOL)
            return any(str(getattr(w.status, "value", w.status)) == "ONLINE" for w in workers)

        until(polls, "the worker polls its pool", START_SECONDS)

    def kill_server(self) -> None:
        assert self.server is not None
        self.server.kill()
        self.server.wait()
        self.server = None

    def kill_worker(self) -> None:
        assert self.worker is not None
        self.worker.kill()
        self.worker.wait()
        self.worker = None

    def restore(self) -> None:
        """Start again what a failed test killed, and end what it started."""
        for command in self.commands:
            if command.returncode is None:
                command.kill()
                command.communicate()
        self.commands.clear()
        if self.server is None:
            self.start_server()
        if self.worker is None:
            self.start_worker()

    def end(self) -> None:
        for process in (self.worker, self.server):
            if process is not None:
                process.kill()
                process.wait()

    def client(self) -> SyncPrefectClient:
        return SyncPrefectClient(self.api)

    # ------------------------------------------------------------------------------------------------- deployments

    def deploy(self, lab: Lab, name: str, *, schema: dict[str, Any] | None = None) -> str:
        """A deployment `pretrain/NAME` whose flow runs use this state folder and its faults."""
        wanted = schema or parameter_schema(pretrain).model_dump(exclude_unset=True)
        self._deploy("pretrain", name, "flows.pretrain_flow.pretrain", wanted, lab, [], {})
        return f"pretrain/{name}"

    def deploy_reconciler(self, lab: Lab, name: str, seconds: int) -> UUID:
        """A deployment `reconcile/NAME` with a schedule."""
        schedule = DeploymentScheduleCreate(schedule=IntervalSchedule(interval=seconds), active=True)
        schema = parameter_schema(reconcile).model_dump(exclude_unset=True)
        entrypoint = "flows.reconcile_flow.reconcile"
        return self._deploy("reconcile", name, entrypoint, schema, lab, [schedule], {})

    def _deploy(
        self,
        flow: str,
        name: str,
        entrypoint: str,
        schema: dict[str, Any],
        lab: Lab,
        schedules: list[DeploymentScheduleCreate],
        parameters: dict[str, Any],
    ) -> UUID:
        shipped = deployments()[0].job_variables["env"]
        variables = {**shipped, "HEADRACE_HOME": str(lab.home), **lab.environment}
        with self.client() as client:
            return client.create_deployment(
                client.create_flow_from_name(flow),
                name,
                entrypoint=entrypoint,
                work_pool_name=POOL,
                parameters=parameters,
                schedules=schedules,
                parameter_openapi_schema=schema,
                enforce_parameter_schema=True,
                job_variables={"env": variables},
            )

    def delete_deployment(self, deployment: UUID) -> None:
        with self.client() as client:
            client.delete_deployment(deployment)

    # ----------------------------------------------------------------------------------------------------- commands

    def start(self, lab: Lab, *arguments: str) -> "subprocess.Popen[str]":
        """A headrace command that knows this server, and has another state folder than the worker."""
        return self._command([*COMMAND, *arguments], lab.folder / "elsewhere")

    def start_reconciler(self, lab: Lab, **parameters: Any) -> "subprocess.Popen[str]":
        """The flow `reconcile` as a process on the state folder, without a deployment."""
        text = "import json, sys; from flows.reconcile_flow import reconcile; print(json.dumps(reconcile(**%r)))"
        return self._command([sys.executable, "-c", text % {"watch_seconds": 5.0, **parameters}], lab.home)

    def reconcile(self, lab: Lab, **parameters: Any) -> list[str]:
        """Run the reconciler once; returns what it did."""
        return done(self.start_reconciler(lab, **parameters))

    def _command(self, command: list[str], home: Path) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**self.environment, "HEADRACE_HOME": str(home)},
        )
        self.commands.append(process)
        return process

    def headrace(self, lab: Lab, *arguments: str, seconds: float = SECONDS) -> "subprocess.CompletedProcess[str]":
        process = self.start(lab, *arguments)
        return finish(process, seconds)

    def trigger(self, lab: Lab, deployment: str, *arguments: str) -> dict[str, Any]:
        """Trigger without waiting; returns the command's document."""
        asked = self.headrace(
            lab, "trigger", "--config", str(lab.write_config()), "--deployment", deployment, "--json", *arguments
        )
        assert asked.returncode == 0, asked.stderr
        document: dict[str, Any] = json.loads(asked.stdout)
        return document

    # ----------------------------------------------------------------------------------------------------- questions

    def flow_run(self, flow_run_id: str) -> FlowRun:
        with self.client() as client:
            return client.read_flow_run(UUID(flow_run_id))

    def state(self, flow_run_id: str) -> str:
        return str(self.flow_run(flow_run_id).state_name)

    def ended(self, flow_run_id: str) -> FlowRun:
        """The flow run, when it has ended."""

        def look() -> FlowRun | None:
            flow_run = self.flow_run(flow_run_id)
            return flow_run if flow_run.state and flow_run.state.is_final() else None

        return until(look, f"the flow run {flow_run_id} ends")  # type: ignore[return-value] # never None

    def flow_runs(self, deployment: str) -> list[FlowRun]:
        """All flow runs of a deployment, the oldest first."""
        with self.client() as client:
            found = client.read_deployment_by_name(deployment)
            wanted = DeploymentFilter(id=DeploymentFilterId(any_=[found.id]))
            runs = client.read_flow_runs(deployment_filter=wanted, sort=FlowRunSort.EXPECTED_START_TIME_ASC)
        return sorted(runs, key=lambda run: run.created or run.expected_start_time)  # type: ignore[type-var,return-value]

    def kill_flow_run(self, flow_run_id: str) -> None:
        """Kill the process of a flow run; what it started ends by itself."""

        def look() -> psutil.Process | None:
            found = [p for p in psutil.process_iter() if variable(p, "PREFECT__FLOW_RUN_ID") == flow_run_id]
            return min(found, key=lambda process: process.create_time()) if found else None

        top = until(look, "the flow run has a process")
        assert top is not None
        below = top.children(recursive=True)
        top.kill()
        _, left = psutil.wait_procs(below, timeout=ORPHAN_SECONDS)
        assert left == []


def variable(process: psutil.Process, name: str) -> str | None:
    """A variable of a process's environment; None when it has ended meanwhile, or belongs to somebody else."""
    try:
        return process.environ().get(name)
    except psutil.Error:
        return None


def finish(process: "subprocess.Popen[str]", seconds: float = SECONDS) -> "subprocess.CompletedProcess[str]":
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        raise AssertionError(f"{process.args} took longer than {seconds} s:\n{out[-3000:]}\n{err[-6000:]}") from None
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def done(reconciler: "subprocess.Popen[str]") -> list[str]:
    """What a reconciler did, in words."""
    ended = finish(reconciler)
    assert ended.returncode == 0, ended.stderr
    said: list[str] = json.loads(ended.stdout.splitlines()[-1])
    return said


@contextlib.contextmanager
def running_stack(folder: Path) -> Iterator[Stack]:
    """A server and a worker while the block runs."""
    stack = Stack(folder)
    try:
        stack.start_server()
        with stack.client() as client:
            client.create_work_pool(WorkPoolCreate(name=POOL, type="process"))
        stack.start_worker()
        yield stack
    finally:
        stack.end()


# ----------------------------------------------------------------------------------------------------------- the store


def run_folder(lab: Lab) -> Path:
    """The one run of a state folder."""
    (key,) = (lab.store / "run-keys").iterdir()
    return lab.store / "runs" / str(json.loads(key.read_text(encoding="utf-8"))["run_id"]) / "artifacts"


def committed(lab: Lab, step: int) -> bool:
    """Whether this step, or a later one, is committed."""
    names = [path.parts[-3] for path in lab.store.glob("runs/*/artifacts/checkpoints/step-*/attempt-*/COMMIT.json")]
    return any(int(name.removeprefix("step-")) >= step for name in names)


def attempts(lab: Lab) -> int:
    """Launches of the one run."""
    return len(list((run_folder(lab) / "attempts").glob("*.json")))
