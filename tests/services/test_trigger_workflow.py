"""The workflow for GitHub Actions, step by step with bash, as its runner does it, against a real server and worker."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.chaos.harness import Lab
from tests.services.prefect_stack import SLOW_STEPS, Stack, committed, until

ROOT = Path(__file__).resolve().parents[2]
WORKFLOW = ROOT / "deployments/github/pretrain.yaml"
SHELL = ["bash", "--noprofile", "--norc", "-eo", "pipefail"]
"""What `shell: bash` means there."""

SECONDS = 240


class Job:
    """The one job of the workflow, its values filled in, in a checkout of its own."""

    def __init__(self, stack: Stack, lab: Lab, deployment: str, **values: str) -> None:
        self.document: dict[str, Any] = yaml.safe_load(WORKFLOW.read_text(encoding="utf-8"))
        (self.job,) = self.document["jobs"].values()
        self.folder = lab.folder / "checkout"
        self.folder.mkdir()
        shutil.copy(ROOT / "constraints.txt", self.folder)
        (self.folder / "my.yaml").write_text(yaml.safe_dump(lab.config), encoding="utf-8")
        self.values = {
            "vars.PREFECT_API_URL": stack.api,
            "inputs.config": "my.yaml",
            "github.sha": "0a1b2c3",
            **values,
        }
        self.summary = self.folder / "summary.md"
        self.deployment = deployment
        # The installation that the tests run in takes the place of the one that the workflow makes.
        tools = self.folder / "tools"
        tools.mkdir()
        python = tools / "python"
        python.write_text(
            f'#!/bin/bash\n[ "$1 $2" = "-m pip" ] && {{ echo "$@" >> pip.txt; exit 0; }}\nexec {sys.executable} "$@"\n'
        )
        python.chmod(0o755)
        self.environment = {
            **stack.environment,
            **{name: self.fill(text) for name, text in self.job["env"].items()},
            "HEADRACE_HOME": str(self.folder / "home"),
            "PATH": f"{tools}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "GITHUB_STEP_SUMMARY": str(self.summary),
        }

    def fill(self, text: str) -> str:
        """The expression as the runner would evaluate it: `a || b` is the first that is not empty."""

        def value(match: "re.Match[str]") -> str:
            parts = [part.strip() for part in match[1].split("||")]
            found = [p[1:-1] if p.startswith("'") else self.values.get(p, "") for p in parts]
            return next((f for f in found if f), "")

        return re.sub(r"\$\{\{(.+?)\}\}", value, text)

    def start(self, step: dict[str, Any]) -> "subprocess.Popen[str]":
        assert "${{" not in step["run"], "values reach a script through the environment only"
        script = self.folder / "script.sh"
        script.write_text(step["run"], encoding="utf-8")
        return subprocess.Popen(
            [*SHELL, str(script)],
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )

    def run(self, cancel_when: Any = None) -> dict[str, int]:
        """Run the steps in order; returns the exit code of each by name. `cancel_when` says when somebody cancels."""
        codes: dict[str, int] = {}
        failed = cancelled = False
        for step in (step for step in self.job["steps"] if "run" in step):
            condition = step.get("if", "success()")
            due = {"success()": not failed and not cancelled, "always()": True, "cancelled()": cancelled}[condition]
            if not due:
                continue
            process = self.start(step)
            if cancel_when is not None and "--wait" in step["run"]:
                until(cancel_when, "the moment to cancel")
                os.killpg(process.pid, signal.SIGKILL)  # the hardest way: the command cannot cancel the run itself
                cancelled = True
            out, _ = process.communicate(timeout=SECONDS)
            print(f"== {step['name']}: {process.returncode}\n{out}")
            codes[step["name"]] = process.returncode
            failed = failed or process.returncode != 0
        return codes


def test_the_workflow_takes_a_commit_to_a_model(stack: Stack, local_lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    deployment = stack.deploy(local_lab, "pretrain")
    job = Job(stack, local_lab, deployment, **{"inputs.overrides": "training.steps=8 schedule.warmup_steps=1"})

    codes = job.run()

    assert codes == dict.fromkeys(["Install", "Check the config", "Ask for the run", "See it through", "Summary"], 0)
    assert "-c constraints.txt ." in (job.folder / "pip.txt").read_text()
    (flow_run,) = [run for run in stack.flow_runs(deployment) if run.idempotency_key == "0a1b2c3"]
    assert flow_run.state_name == "Completed"
    assert flow_run.parameters["config"]["training"]["steps"] == 8
    summary = job.summary.read_text(encoding="utf-8")
    assert summary.startswith("# chaos")
    assert f"[Prefect](http://127.0.0.1:{stack.port}/runs/flow-run/{flow_run.id})" in summary


@pytest.mark.slow
def test_a_cancelled_workflow_cancels_its_run(stack: Stack, local_lab: Lab) -> None:
    local_lab.plan(SLOW_STEPS)
    deployment = stack.deploy(local_lab, "pretrain")
    job = Job(stack, local_lab, deployment, **{"github.sha": "c4nc3l"})

    codes = job.run(cancel_when=lambda: committed(local_lab, 4))

    assert codes["Cancel the run"] == 0
    asked = json.loads((job.folder / "asked.json").read_text())
    assert stack.ended(asked["flow_run_id"]).state_name == "Cancelled"
    until(lambda: not local_lab.processes(), "every process has ended", 30.0)
    assert f"/runs/flow-run/{asked['flow_run_id']}" in job.summary.read_text(encoding="utf-8")


def test_a_wrong_config_ends_the_workflow_before_anything_is_asked_for(stack: Stack, local_lab: Lab) -> None:
    job = Job(stack, local_lab, "", **{"inputs.overrides": "training.stepz=8"})

    codes = job.run()

    assert codes == {"Install": 0, "Check the config": 2, "Summary": 0}
    assert not (job.folder / "asked.json").exists()


def test_secrets_reach_it_through_the_environment_only(stack: Stack) -> None:
    text = WORKFLOW.read_text(encoding="utf-8")
    document = yaml.safe_load(text)
    (job,) = document["jobs"].values()
    scripts = "\n".join(step.get("run", "") for step in job["steps"])

    assert "secrets." not in scripts
    assert "${{" not in scripts
    assert document["concurrency"]["cancel-in-progress"] is False
    assert document["permissions"] == {"contents": "read"}


pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning")
