"""What `headrace trigger` sends, what it refuses before anything is posted, and how it watches."""

import io
import json
import os
import signal
import threading
from types import SimpleNamespace
from uuid import uuid4

import httpx
import pytest
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.states import State

from flows import cli
from flows.config import PipelineConfig
from flows.reconcile import successor_key
from flows.trigger import api_errors, api_url, differences, for_worker
from flows.watching import Watch, table
from headrace.config_check import parse
from headrace.errors import Cancelled, ConfigError, NotFound, Retryable, Terminal
from headrace.terminal import Terminal as Shown

DOCUMENT = {"name": "tiny", "data": {"name": "tiny", "inputs": [{"path": "/data/texts"}]}}


def config(**data):
    return parse(PipelineConfig, {**DOCUMENT, **data})


@pytest.fixture
def terminal():
    return Shown(plain=True, stream=io.StringIO())


def said(terminal):
    return terminal._console.file.getvalue()


@pytest.fixture
def home(monkeypatch, tmp_path):
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


# -------------------------------------------------------------------------------------------------------- which API


def test_without_a_server_both_ways_to_one_are_named(home):
    with pytest.raises(ConfigError, match=r"PREFECT_API_URL .* `headrace up`"):
        api_url()


def test_the_servers_of_this_state_folder_are_found(home, monkeypatch):
    (home / "services.json").write_text(json.dumps({"prefect_api": "http://127.0.0.1:4200/api"}))
    assert api_url() == "http://127.0.0.1:4200/api"
    monkeypatch.setenv("PREFECT_API_URL", "https://prefect.example/api")
    assert api_url() == "https://prefect.example/api"


def test_a_wrong_address_and_a_damaged_file_are_said(home, monkeypatch):
    (home / "services.json").write_text("{")
    with pytest.raises(ConfigError, match=r"services\.json cannot be read"):
        api_url()
    monkeypatch.setenv("PREFECT_API_URL", "ephemeral")
    with pytest.raises(ConfigError, match="must start with http"):
        api_url()


# ------------------------------------------------------------------------------------------------------------ paths


def test_relative_paths_are_sent_as_absolute_ones_and_that_is_said(terminal, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    (tmp_path / "tok.json").write_text("{}")
    asked = config(
        data={"name": "tiny", "inputs": [{"path": "texts"}, {"path": "texts/*.txt"}, {"path": "python-stdlib:"}]},
        tokenizer={"path": "tok.json"},
        storage={"root": "store"},
    )
    sent = for_worker(asked, terminal)
    assert [part.path for part in sent.data.inputs] == [
        f"{tmp_path}/texts",
        f"{tmp_path}/texts/*.txt",
        "python-stdlib:",
    ]
    assert sent.tokenizer.path == f"{tmp_path}/tok.json"
    assert sent.storage.root == f"{tmp_path}/store"
    assert f"data.inputs.0.path is sent as {tmp_path}/texts: the worker has to see it there." in said(terminal)


def test_a_relative_path_that_is_not_here_is_refused_with_the_absolute_one(terminal, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=rf"--set data\.inputs\.0\.path={tmp_path}/texts"):
        for_worker(config(data={"name": "tiny", "inputs": [{"path": "texts"}]}), terminal)


def test_absolute_paths_and_urls_are_sent_as_they_are(terminal):
    asked = config(storage={"root": "s3://bucket/prefix"}, data={"name": "t", "inputs": [{"path": "~/texts"}]})
    assert for_worker(asked, terminal) == asked
    assert said(terminal) == ""


# ------------------------------------------------------------------------------------------------------- the same key


def test_another_config_under_the_same_key_is_named_field_by_field():
    before = config().model_dump(mode="json")
    assert differences(before, config()) == []
    assert differences(before, config(training={"steps": 777})) == [
        f"training.steps is {before['training']['steps']} there, 777 here"
    ]
    many = config(
        seed=2, name="b", training={"steps": 777}, optimizer={"learning_rate": 0.5}, schedule={"warmup_steps": 1}
    )
    assert differences(before, many)[-1].startswith("and ")
    assert differences(None, config()) == ["it is no config"]


def test_a_field_that_is_new_since_then_is_no_difference():
    before = config().model_dump(mode="json")
    del before["tracking"]
    assert differences(before, config()) == []


def test_faults_of_the_config_come_before_any_server(home, capfd, tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(json.dumps({**DOCUMENT, "training": {"stepz": 1}}))
    assert cli.execute(["trigger", "--config", str(path)]) == 2
    assert "stepz" in capfd.readouterr().err


# ------------------------------------------------------------------------------------------------------------- errors


def answer(code, detail="no"):
    request = httpx.Request("GET", "http://127.0.0.1/api")
    return httpx.HTTPStatusError("x", request=request, response=httpx.Response(code, json={"detail": detail}))


@pytest.mark.parametrize(
    ("error", "kind", "told"),
    [
        (answer(401), ConfigError, "PREFECT_API_KEY"),
        (answer(500, "a defect"), Retryable, "answered 500: a defect"),
        (httpx.ConnectError("refused"), Retryable, "does not answer"),
    ],
    ids=["rights", "server", "away"],
)
def test_what_a_failed_request_means(error, kind, told):
    with pytest.raises(kind, match=told), api_errors("http://127.0.0.1:1/api"):
        raise error


# ------------------------------------------------------------------------------------------------------------ watching


class Api:
    """A Prefect API: a script of states for each flow run, and errors in between."""

    def __init__(self, *script, reconciled=False, workers=("ONLINE",)):
        self.id = uuid4()
        self.script = {self.id: list(script)}
        self.names = {self.id: "brave-fox"}
        self.successors = {}
        self.reconciled = reconciled
        self.workers = workers
        self.wishes = []
        self.artifacts = []
        self.tasks = []

    def first(self):
        return self._run(self.id, State(type=StateType.SCHEDULED))

    def _run(self, run_id, state):
        return FlowRun(
            id=run_id, flow_id=uuid4(), name=self.names[run_id], state=state, state_name=state.name,
            state_type=state.type, work_pool_name="pool",
        )  # fmt: skip

    def continue_as(self, *script):
        other = uuid4()
        self.names[other] = "brave-fox.2"
        self.script[other] = list(script)
        self.successors[successor_key(str(self.id))] = other
        return other

    def read_flow_run(self, run_id):
        script = self.script[run_id]
        now = script.pop(0) if len(script) > 1 else script[0]
        if callable(now):
            now = now()
        if isinstance(now, Exception):
            raise now
        state = now if isinstance(now, State) else State(type=now)
        return self._run(run_id, state)

    def read_flow_runs(self, flow_run_filter):
        keys = flow_run_filter.idempotency_key.any_
        return [self._run(self.successors[k], State(type=StateType.SCHEDULED)) for k in keys if k in self.successors]

    def read_deployments(self, flow_filter):
        schedule = SimpleNamespace(active=True)
        return [SimpleNamespace(paused=False, schedules=[schedule])] if self.reconciled else []

    def read_workers_for_work_pool(self, pool):
        return [SimpleNamespace(status=status) for status in self.workers]

    def read_task_runs(self, flow_run_filter):
        return self.tasks

    def read_artifacts(self, **_):
        return self.artifacts

    def set_flow_run_state(self, run_id, state):
        self.wishes.append((run_id, state.type))


def watch(api, terminal, **more):
    return Watch(api, api.first(), terminal, poll=0.01, **more)


def test_a_completed_run_comes_back_with_its_summary(terminal):
    api = Api("SCHEDULED", "PENDING", "RUNNING", "COMPLETED")
    row = {"name": "train", "outcome": "done", "seconds": 1.0, "detail": "step 12"}
    # newest first, as the server sorts them
    api.artifacts = [
        SimpleNamespace(id=uuid4(), key=key, type=kind, data=data)
        for key, kind, data in [
            ("mlflow", "markdown", "[MLflow](http://127.0.0.1:5000/#/x?workflowType=machine_learning)"),
            ("stages", "table", json.dumps([row])),
            ("summary", "markdown", "# tiny"),
            ("summary", "markdown", "# an older one"),
        ]
    ]
    result = watch(api, terminal).to_the_end()
    assert (result["state"], result["stages"], result["summary"]) == ("Completed", [row], "# tiny")
    assert result["pages"]["MLflow"].startswith("http://127.0.0.1:5000/")


@pytest.mark.parametrize(
    ("state", "error"),
    [("FAILED", Terminal), ("CRASHED", Terminal), ("CANCELLED", Cancelled)],
)
def test_every_other_end_is_an_error_with_the_reason(terminal, state, error):
    api = Api("RUNNING", State(type=state, message="rank 1 was killed"))
    with pytest.raises(error, match=r"brave-fox .* rank 1 was killed"):
        watch(api, terminal).to_the_end()


def test_an_outage_of_the_api_is_ridden_out_and_said_once(terminal):
    away = [httpx.ConnectError("refused"), answer(503), httpx.ReadTimeout("slow")]
    api = Api("RUNNING", *away, "RUNNING", "COMPLETED")
    assert watch(api, terminal).to_the_end()["state"] == "Completed"
    assert said(terminal).count("does not answer; asking again") == 1
    assert said(terminal).count("answers again") == 1


def test_an_outage_without_end_ends_the_wait_not_the_run(terminal):
    with pytest.raises(Retryable, match="same idempotency key"):
        watch(Api("RUNNING", httpx.ConnectError("refused")), terminal, outage=0.05).to_the_end()


def test_a_refusal_is_no_outage(terminal):
    with pytest.raises(httpx.HTTPStatusError):
        watch(Api("RUNNING", answer(401)), terminal).to_the_end()


def test_a_deleted_flow_run_is_said(terminal):
    from prefect.exceptions import ObjectNotFound

    with pytest.raises(NotFound, match="no flow run"):
        watch(Api("RUNNING", ObjectNotFound(answer(404))), terminal).to_the_end()


def test_the_wait_ends_at_its_timeout(terminal):
    with pytest.raises(Retryable, match=r"still Running after 0 s \(--timeout\)"):
        watch(Api("RUNNING"), terminal, timeout=0.05).to_the_end()


def test_a_crashed_run_is_followed_to_the_one_that_continues_it(terminal):
    api = Api("RUNNING", "CRASHED")
    other = api.continue_as("RUNNING", "COMPLETED")
    result = watch(api, terminal).to_the_end()
    assert result["flow_run_id"] == str(other)
    assert "brave-fox.2 continues it" in said(terminal)


def test_where_runs_are_reconciled_a_crash_is_waited_out(terminal):
    api = Api(reconciled=True)
    api.script[api.id] = ["RUNNING", "CRASHED", "CRASHED", lambda: api.continue_as("COMPLETED") and "CRASHED"]
    assert watch(api, terminal).to_the_end()["flow_run"] == "brave-fox.2"


def test_a_run_that_the_reconciler_gave_up_is_failed(terminal):
    api = Api("RUNNING", "CRASHED", State(type="FAILED", message="no further than step 4"), reconciled=True)
    with pytest.raises(Terminal, match="no further than step 4"):
        watch(api, terminal).to_the_end()


@pytest.mark.parametrize(("workers", "told"), [((), True), (("OFFLINE",), True), (("ONLINE",), False)])
def test_a_queue_that_nobody_polls_is_said_once(terminal, monkeypatch, workers, told):
    monkeypatch.setattr("flows.watching.NO_WORKER_SECONDS", 0.0)
    api = Api(*["SCHEDULED"] * 5, "COMPLETED", workers=workers)
    watch(api, terminal).to_the_end()
    assert said(terminal).count("no worker polls the work pool 'pool'") == int(told)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_cancels_the_run_and_waits_for_its_end(terminal, number):
    api = Api("RUNNING")

    def cancel():
        api.script[api.id] = ["CANCELLING", "CANCELLING", "CANCELLED"]
        os.kill(os.getpid(), number)

    threading.Timer(0.1, cancel).start()
    with pytest.raises(Cancelled, match="brave-fox is Cancelled"):
        watch(api, terminal).to_the_end()
    assert api.wishes == [(api.id, StateType.CANCELLING)]


def test_a_run_that_does_not_end_is_left_cancelling(terminal, monkeypatch):
    monkeypatch.setattr("flows.watching.CANCEL_SECONDS", 0.1)
    api = Api("RUNNING", "CANCELLING")
    threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()
    with pytest.raises(Cancelled, match="has not ended yet"):
        watch(api, terminal).to_the_end()


def test_what_is_shown_changes_with_the_stage(terminal):
    api = Api("RUNNING", "COMPLETED")
    running = SimpleNamespace(is_running=lambda: True)
    api.tasks = [SimpleNamespace(name="train-a1b", state=running), SimpleNamespace(name="prepare-0", state=None)]
    api.artifacts = [SimpleNamespace(id=uuid4(), key="progress", type="progress", data=41.7)]
    shown = watch(api, terminal)
    shown._run = api.read_flow_run(api.id)
    assert shown._progress() == {"state": "Running", "stage": "train", "progress": "42%"}


def test_the_rows_of_a_table_come_as_text_or_as_rows():
    assert table('[{"a": 1}]') == table([{"a": 1}]) == [{"a": 1}]
    assert table(None) == []
