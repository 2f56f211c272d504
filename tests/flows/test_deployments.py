"""What `deployments/` says is what there is: flows, parameters, schedules, automations."""

import importlib
import sys
from pathlib import Path
from uuid import uuid4

import pytest
import yaml
from prefect import Flow
from prefect.client.schemas.objects import FlowRun
from prefect.client.schemas.schedules import construct_schedule
from prefect.events.schemas.automations import AutomationCore

from flows import deployments
from flows.config import PipelineConfig
from flows.services_setup import job_template, missed_runs
from headrace.config import load_document
from headrace.config_check import parse

ROOT = Path(__file__).resolve().parents[2]
ALL = {deployment.name: deployment for deployment in deployments.deployments()}
FLOWS = {"pretrain", "prepare-data", "train-model", "evaluate-model", "register-model"}
HEARTBEAT_SECONDS = 30


def flow_of(name: str) -> Flow:
    module, _, attribute = ALL[name].entrypoint.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def test_every_stage_and_the_whole_way_have_a_deployment():
    assert set(ALL) >= FLOWS | {"quickstart"}
    assert {flow_of(name).name for name in ALL} >= FLOWS


@pytest.mark.parametrize("name", ALL)
def test_an_entry_point_is_a_module_whose_flow_says_what_it_does(name):
    assert ":" not in ALL[name].entrypoint, "a file would put flows/ first on the path of modules"
    assert flow_of(name).description
    assert len(ALL[name].description) > 20


def test_the_quickstart_starts_with_the_whole_document():
    config = ALL["quickstart"].parameters["config"]
    assert config == load_document(ROOT / "configs" / "quickstart.yaml")
    assert parse(PipelineConfig, config).name == "quickstart"


def test_the_plain_one_starts_with_the_defaults():
    assert ALL["pretrain"].parameters == {}


def test_trainings_wait_for_each_other_in_a_queue():
    assert deployments.queues() == {"trainings": 1}
    waiting = {name for name, deployment in ALL.items() if deployment.queue == "trainings"}
    assert waiting == {"pretrain", "quickstart", "train-model", "evaluate-model", "register-model"}


def test_no_training_needs_a_lease_of_the_server():
    """Prefect ends a flow run that cannot renew it, for example after the server was away."""
    document = yaml.safe_load((ROOT / "deployments" / "prefect.yaml").read_text())
    assert [item["name"] for item in document["deployments"] if "concurrency_limit" in item] == ["reconcile"]


def test_a_schedule_is_named_and_off():
    (schedule,) = ALL["pretrain"].schedules
    assert (schedule["slug"], schedule["active"]) == ("nightly", False)
    assert construct_schedule(cron=schedule["cron"], timezone=schedule["timezone"]).cron == "0 2 * * *"


def test_the_reconciler_is_scheduled_and_what_is_one_too_many_is_dropped():
    (schedule,) = ALL["reconcile"].schedules
    assert (schedule["interval"], schedule["active"]) == (30, True)
    assert (ALL["reconcile"].limit, ALL["reconcile"].collision_strategy) == (1, "CANCEL_NEW")
    assert set(flow_of("reconcile").parameters.properties["flow_names"]["default"]) == FLOWS


def test_every_deployment_sends_heartbeats_as_often_as_the_automation_expects():
    for deployment in ALL.values():
        assert deployment.job_variables["env"]["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"] == str(HEARTBEAT_SECONDS)


def test_a_silent_run_is_marked_after_several_missed_heartbeats_and_never_after_its_end():
    (automation,) = [AutomationCore.model_validate(document) for document in deployments.automations()]
    trigger = automation.trigger
    assert trigger.within.total_seconds() >= 3 * HEARTBEAT_SECONDS
    assert trigger.within.total_seconds() > 100 + HEARTBEAT_SECONDS, "a process may be blocked for a while"
    ends = {f"prefect.flow-run.{state}" for state in ("Completed", "Failed", "Cancelled", "Crashed")}
    assert trigger.expect >= ends | {"prefect.flow-run.heartbeat"}
    assert set(trigger.match_related["prefect.resource.name"]) == FLOWS | {"reconcile"}, "one that died has a place"
    assert automation.actions[0].state == "CRASHED"


def test_a_flow_run_is_one_process_in_the_folder_where_up_was_started():
    template = job_template("a folder")
    variables = template["variables"]["properties"]
    assert variables["command"]["default"] == f"{sys.executable} -P -m prefect.engine"
    assert variables["working_dir"]["default"] == "a folder"
    assert template["job_configuration"]["command"] == "{{ command }}"
    assert template["job_configuration"]["working_dir"] == "{{ working_dir }}"


def test_of_the_runs_that_a_schedule_missed_only_the_last_is_made_up_for():
    def run(planned, count=0):
        return FlowRun(flow_id=uuid4(), auto_scheduled=planned, run_count=count)

    asked, last, older, oldest, retried = run(False), run(True), run(True), run(True), run(True, 1)
    assert missed_runs([asked, last, older, retried, oldest]) == [older, oldest]
    assert missed_runs([asked, last]) == missed_runs([]) == []


def test_the_wheel_carries_the_same_files(tmp_path, monkeypatch):
    """In a wheel they lie inside the package, and are found there first."""
    inside = tmp_path / "flows" / "deployments"
    inside.mkdir(parents=True)
    (inside / "prefect.yaml").write_text("deployments: []")
    monkeypatch.setattr(deployments, "__file__", str(tmp_path / "flows" / "deployments.py"))
    assert deployments.folder() == inside
    assert deployments.deployments() == []
