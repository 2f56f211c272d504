"""`headrace up` on a state folder with a past: everything of it is shown, runs are started and scheduled, parts die."""

import datetime
import itertools
import json
import os
import stat
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from prefect.client.schemas.schedules import IntervalSchedule

from headrace.process import pid_alive
from tests.chaos.conftest import make_lab
from tests.chaos.harness import Lab
from tests.mlflow_database import NOLOAD
from tests.services.stack import Up, started_up, until

pytestmark = pytest.mark.filterwarnings(NOLOAD)

STAGES = ["prepare", "train", "export", "evaluate", "register"]
AGAIN_SECONDS = 90.0


@pytest.fixture(scope="module")
def past_lab(tmp_path_factory: pytest.TempPathFactory, corpus: Path, tokenizer_file: Path) -> Lab:
    """A state folder on which a command without servers made a run."""
    lab = make_lab(tmp_path_factory.mktemp("up"), corpus, tokenizer_file)
    lab.run_to_the_end()
    return lab


@pytest.fixture(scope="module")
def up(past_lab: Lab) -> Iterator[Up]:
    with started_up(past_lab) as running:
        yield running


@pytest.fixture(scope="module")
def past(past_lab: Lab) -> str:
    """Id of the run that was there before."""
    (key,) = (past_lab.store / "run-keys").iterdir()
    return str(json.loads(key.read_text(encoding="utf-8"))["run_id"])


def config_of(up: Up, **changes: Any) -> dict[str, Any]:
    return {**up.lab.config, **changes}


def fetch(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        assert answer.status == 200
        return str(answer.read().decode("utf-8"))


def test_what_is_live_is_written_down_for_this_user_only(up: Up) -> None:
    path = up.lab.home / "services.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    record = json.loads(path.read_text(encoding="utf-8"))
    assert record == up.document
    assert record["pid"] == up.pid
    assert [service["name"] for service in record["services"]] == ["prefect", "mlflow", "worker"]
    assert all(pid_alive(service["pid"], service["start_time"]) for service in record["services"])


def test_the_pages_that_are_printed_can_be_opened(up: Up) -> None:
    said = up.said()
    assert f"Prefect: {up.document['prefect_ui']}" in said
    assert f"MLflow:  {up.mlflow}/#/experiments?workflowType=machine_learning" in said
    assert "<html" in fetch(up.document["prefect_ui"]).lower()
    assert "<html" in fetch(up.mlflow).lower()
    settings = json.loads(fetch(f"{up.document['prefect_ui']}/ui-settings"))
    assert settings["api_url"] == up.prefect_api


def test_status_knows_every_part(up: Up) -> None:
    status = up.status()
    assert status["live"] is True
    assert {s["name"]: (s["alive"], s["answers"]) for s in status["services"]} == {
        "prefect": (True, True),
        "mlflow": (True, True),
        "worker": (True, True),
    }
    names = {deployment["name"] for deployment in status["deployments"]}
    assert names >= {
        "pretrain/pretrain",
        "pretrain/quickstart",
        "prepare-data/prepare-data",
        "train-model/train-model",
        "evaluate-model/evaluate-model",
        "register-model/register-model",
    }
    told = up.lab.command("status")
    assert told.returncode == 0
    assert "pretrain/quickstart" in told.stderr


def test_the_past_run_is_shown_by_both_servers(up: Up, past: str) -> None:
    with up.client() as client:
        finished = [run for run in client.read_flow_runs() if run.deployment_id is None]
    assert [str(run.state_name) for run in finished] == ["Completed"]
    client = MlflowClient(up.mlflow)
    assert client.get_run(past).info.status == "FINISHED"
    assert client.get_model_version_by_alias("chaos", "champion").run_id == past
    assert "run.json" in {file.path for file in client.list_artifacts(past)}


def test_making_the_deployments_again_leaves_what_people_set(up: Up) -> None:
    with up.client() as client:
        (schedule,) = client.read_deployment_by_name("pretrain/pretrain").schedules
        assert (schedule.slug, schedule.active) == ("nightly", False)
        (automation,) = automations(up)
        assert (automation["name"], automation["enabled"]) == ("headrace silent runs", True)

        client.request("PATCH", f"/automations/{automation['id']}", json={"enabled": False})
        deployment = client.read_deployment_by_name("pretrain/pretrain")
        place = f"/deployments/{deployment.id}/schedules/{schedule.id}"
        client.request("PATCH", place, json={"active": True, "parameters": {"config": up.lab.config}})
        queue = f"/work_pools/headrace/queues/{deployment.work_queue_name}"
        assert client.request("GET", queue).json()["concurrency_limit"] == 1
        client.request("PATCH", queue, json={"concurrency_limit": 2})
        try:
            make_deployments_again(up)
            again = client.read_deployment_by_name("pretrain/pretrain")
            (kept,) = again.schedules
            assert (again.id, kept.slug, kept.active) == (deployment.id, "nightly", True)
            assert kept.parameters == {"config": up.lab.config}
            assert again.global_concurrency_limit is None
            assert again.work_queue_name == "trainings"
            assert client.request("GET", queue).json()["concurrency_limit"] == 2
            assert [a["enabled"] for a in automations(up)] == [False]
            client.request("DELETE", place)
            make_deployments_again(up)
            (new,) = client.read_deployment_by_name("pretrain/pretrain").schedules
            assert (new.slug, new.active) == ("nightly", False)
        finally:
            client.request("PATCH", f"/automations/{automation['id']}", json={"enabled": True})
            client.request("PATCH", queue, json={"concurrency_limit": 1})


def test_the_quickstart_starts_with_a_whole_config(up: Up) -> None:
    with up.client() as client:
        deployment = client.read_deployment_by_name("pretrain/quickstart")
    assert deployment.parameters["config"]["name"] == "quickstart"
    assert deployment.enforce_parameter_schema
    schema = deployment.parameter_openapi_schema
    assert schema is not None
    assert schema["definitions"]["DataConfig"]["title"] == "Data"


def test_prefects_own_command_takes_the_same_file(up: Up) -> None:
    """For a server of one's own; the next `up` brings everything back to what it makes itself."""
    command = [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--prefect-file"]
    done = subprocess.run(
        [*command, "deployments/prefect.yaml", "--name", "quickstart"],
        env={**up.env, "PREFECT_API_URL": up.prefect_api, "PREFECT_HOME": str(up.lab.home / "prefect")},
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    with up.client() as client:
        assert client.read_deployment_by_name("pretrain/quickstart").entrypoint == "flows.pretrain_flow.pretrain"
    make_deployments_again(up)


def automations(up: Up) -> list[dict[str, Any]]:
    with up.client() as client:
        found: list[dict[str, Any]] = client.request("POST", "/automations/filter", json={}).json()
    return found


def make_deployments_again(up: Up) -> None:
    """As the next start does."""
    subprocess.run(
        [sys.executable, "-m", "flows.services_setup", str(up.lab.folder)],
        env={**up.env, "PREFECT_API_URL": up.prefect_api, "PREFECT_HOME": str(up.lab.home / "prefect")},
        check=True,
        capture_output=True,
    )


def test_a_second_one_is_refused_and_says_which_the_first_is(up: Up) -> None:
    refused = up.lab.command("up", "--port", "0", "--mlflow-port", "0")
    assert refused.returncode == 2
    assert f"process {up.pid}" in refused.stderr
    assert up.status()["live"] is True


def test_a_run_from_the_form_becomes_a_registered_version(up: Up) -> None:
    flow_run = up.run_deployment("pretrain/pretrain", config_of(up, name="from-the-form"))
    assert up.ended(flow_run) == "Completed"
    version = MlflowClient(up.mlflow).get_model_version_by_alias("from-the-form", "champion")
    assert version.version == "1"
    shown = json.loads(up.lab.command("runs", "show", "from-the-form", "--json").stdout)
    assert (shown["status"], shown["step"]) == ("FINISHED", 12)
    assert shown["page"].startswith(f"{up.mlflow}/#/experiments/")
    text = up.lab.command("generate", "from-the-form", "--prompt", "import ", "--json")
    assert json.loads(text.stdout)["prompt"] == "import "


def test_a_command_uses_the_servers_and_starts_none(up: Up, past: str) -> None:
    log = up.lab.home / "prefect" / "server.log"
    before = log.stat().st_mtime_ns
    again = up.lab.run_to_the_end()
    assert again["run_id"] == past
    assert [stage["outcome"] for stage in again["stages"]] == ["reused"] * len(STAGES)
    assert again["pages"]["MLflow"].startswith(up.mlflow)
    assert log.stat().st_mtime_ns == before, "the embedded server writes this log"
    with up.client() as client:
        assert len([run for run in client.read_flow_runs() if run.deployment_id is None]) == 2


def test_the_page_of_a_running_server_is_printed_again(up: Up) -> None:
    told = up.lab.command("ui", "--json")
    assert told.returncode == 0
    assert json.loads(told.stdout)["page"] == f"{up.mlflow}/#/experiments?workflowType=machine_learning"
    assert f"served by `headrace up` (process {up.pid})" in told.stderr


def test_a_config_that_is_wrong_is_refused_before_there_is_a_run(up: Up) -> None:
    with pytest.raises(Exception, match=r"num_layers|validation"):
        up.run_deployment("pretrain/pretrain", config_of(up, model={"num_layers": "many"}))


def test_a_schedule_made_through_the_api_fires(up: Up) -> None:
    with up.client() as client:
        deployment = client.read_deployment_by_name("prepare-data/prepare-data")
        place = f"/deployments/{deployment.id}/schedules"
        timing = IntervalSchedule(interval=datetime.timedelta(seconds=30))
        wanted = {
            "schedule": timing.model_dump(mode="json"),
            "active": True,
            "slug": "soon",
            "parameters": {"config": up.lab.config},
        }
        (made,) = client.request("POST", place, json=[wanted]).json()

        def fired() -> Any:
            runs = [run for run in client.read_flow_runs() if run.deployment_id == deployment.id]
            return [run for run in runs if run.auto_scheduled and run.state is not None and run.state.is_completed()]

        until(fired, "the scheduled run completes")
        following = {d["name"]: d["next"] for d in up.status()["deployments"]}
        assert following["prepare-data/prepare-data"] is not None
        client.request("DELETE", f"{place}/{made['id']}")


def test_trainings_of_two_deployments_wait_for_each_other(up: Up) -> None:
    asked = [
        up.run_deployment("pretrain/pretrain", config_of(up, name="first")),
        up.run_deployment("train-model/train-model", config_of(up, name="second")),
    ]
    assert [up.ended(flow_run) for flow_run in asked] == ["Completed", "Completed"]
    first, second = sorted((up.flow_run(flow_run) for flow_run in asked), key=lambda run: str(run.start_time))
    assert first.end_time is not None
    assert second.start_time is not None
    assert first.end_time <= second.start_time


def test_one_reconciler_works_at_a_time_and_what_is_one_too_many_is_dropped(up: Up) -> None:
    with up.client() as client:
        deployment = client.read_deployment_by_name("reconcile/reconcile")
        asked = [client.create_flow_run_from_deployment(deployment.id).id for _ in range(4)]
    ended = [up.ended(flow_run) for flow_run in asked]
    assert set(ended) <= {"Completed", "Cancelled"}
    assert "Cancelled" in ended
    with up.client() as client:
        runs = [run for run in client.read_flow_runs() if run.deployment_id == deployment.id]
    worked = sorted((run.start_time, run.end_time) for run in runs if run.state_name == "Completed")
    assert worked
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(worked))  # type: ignore[operator]


@pytest.mark.parametrize("name", ["worker", "mlflow", "prefect"])
def test_a_part_that_is_killed_is_there_again_and_nothing_is_lost(up: Up, past: str, name: str) -> None:
    killed = up.kill(name)
    until(lambda: up.service(name)["pid"] != killed, f"{name} is started again", AGAIN_SECONDS)
    until(lambda: up.status()["live"], "everything answers", AGAIN_SECONDS)
    assert up.service(name)["url"] == {s["name"]: s["url"] for s in up.document["services"]}[name]
    assert f"{name} died (signal SIGKILL)" in up.said()
    assert os.getpgid(up.pid)

    flow_run = up.run_deployment("prepare-data/prepare-data", config_of(up, name=f"after-{name}"))
    assert up.ended(flow_run) == "Completed"
    assert MlflowClient(up.mlflow).get_run(past).info.status == "FINISHED"


@pytest.mark.slow
def test_a_training_goes_on_while_every_part_dies(up: Up, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    slow = {"point": "step.middle", "action": "sleep", "seconds": 4.0, "always": True}
    plan.write_text(json.dumps({"dir": str(tmp_path), "faults": [slow]}), encoding="utf-8")
    flow_run = up.run_deployment("pretrain/pretrain", config_of(up, name="steady"), {"HEADRACE_FAULTS": str(plan)})
    until(lambda: any("training.main" in " ".join(p.cmdline()) for p in up.processes()), "the training runs")
    for name in ("prefect", "mlflow", "worker"):
        killed = up.kill(name)
        until(lambda name=name, killed=killed: up.service(name)["pid"] != killed, f"{name} is back", AGAIN_SECONDS)
    until(lambda: up.status()["live"], "everything answers", AGAIN_SECONDS)
    assert [run["state"] for run in up.status()["runs"] if run["flow"] == "pretrain"] == ["Running"]

    assert up.ended(flow_run) == "Completed"
    client = MlflowClient(up.mlflow)
    version = client.get_model_version_by_alias("steady", "champion")
    steps = [point.step for point in client.get_metric_history(version.run_id, "train/loss")]
    assert sorted(steps) == list(range(1, 13)), "each step once, also those that were trained while MLflow was away"
    shown = json.loads(up.lab.command("runs", "show", "steady", "--json").stdout)
    assert (shown["status"], shown["attempts"]) == ("FINISHED", 1)
