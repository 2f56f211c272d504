"""What people do on the pages of Prefect and MLflow, in Debian's Chromium, on the servers of `headrace up`."""

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from playwright.sync_api import Page, expect, sync_playwright
from prefect.client.schemas.actions import DeploymentUpdate

from tests.chaos.conftest import corpus, make_lab, tokenizer_file  # noqa: F401 - fixtures
from tests.mlflow_database import NOLOAD
from tests.services.stack import Up, started_up, until

pytestmark = pytest.mark.filterwarnings(NOLOAD)

CHROMIUM = "chromium"
PAGE_MILLISECONDS = 30_000
SWITCHES = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
"""As root, without a screen, and without asking anything of the network."""


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory, corpus: Path, tokenizer_file: Path) -> Iterator[Up]:  # noqa: F811
    """The servers, on a state folder that has a finished run."""
    if shutil.which(CHROMIUM) is None:
        message = "not run without chromium: as root, apt-get install chromium"
        assert not os.environ.get("CI"), message
        pytest.skip(message)
    lab = make_lab(tmp_path_factory.mktemp("browser"), corpus, tokenizer_file)
    lab.run_to_the_end()
    with started_up(lab) as running:
        yield running


@pytest.fixture
def page(up: Up) -> Iterator[Page]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which(CHROMIUM), args=SWITCHES)
        page = browser.new_page(viewport={"width": 1400, "height": 1000})
        page.set_default_timeout(PAGE_MILLISECONDS)
        expect.set_options(timeout=PAGE_MILLISECONDS)
        yield page
        browser.close()


def deployment_page(up: Up, *, default: dict[str, Any]) -> str:
    """The page of the deployment `pretrain`, whose form starts with `default`."""
    with up.client() as client:
        deployment = client.read_deployment_by_name("pretrain/pretrain")
        client.update_deployment(deployment.id, DeploymentUpdate(parameters={"config": default}))
    return f"{up.document['prefect_ui']}/deployments/deployment/{deployment.id}"


def past_run(up: Up) -> str:
    (key,) = (path for path in (up.lab.store / "run-keys").iterdir() if b'"chaos"' in path.read_bytes())
    return str(json.loads(key.read_text(encoding="utf-8"))["run_id"])


def run_page(up: Up, tab: str) -> str:
    run = MlflowClient(up.mlflow).get_run(past_run(up)).info
    return f"{up.mlflow}/#/experiments/{run.experiment_id}/runs/{run.run_id}/{tab}?workflowType=machine_learning"


def test_the_form_starts_a_run(up: Up, page: Page) -> None:
    page.goto(f"{deployment_page(up, default=up.lab.config)}/run")
    form = page.locator(".schema-form-property", has=page.get_by_text("name of the run:")).first
    name = form.locator("textarea").first
    expect(name).to_have_value("chaos")
    name.fill("from-the-page")
    page.get_by_role("button", name="Submit").click()
    expect(page).to_have_url(re.compile(r"tab=Runs"))

    def asked_for() -> Any:
        with up.client() as client:
            runs = client.read_flow_runs()
        return next((r for r in runs if r.parameters.get("config", {}).get("name") == "from-the-page"), None)

    flow_run = until(asked_for, "the form has made a flow run", 30)
    # Nothing that the form does not show is lost: it sends the whole document.
    assert flow_run.parameters["config"]["training"]["steps"] == 12
    assert up.ended(flow_run.id) == "Completed"
    assert MlflowClient(up.mlflow).get_model_version_by_alias("from-the-page", "champion").version == "1"
    page.goto(f"{up.document['prefect_ui']}/runs/flow-run/{flow_run.id}")
    page.get_by_role("tablist").get_by_text("Artifacts", exact=True).click()
    expect(page.get_by_text("What the pipeline came back with").first).to_be_visible()


def test_a_schedule_is_set(up: Up, page: Page) -> None:
    page.goto(deployment_page(up, default=up.lab.config))
    expect(page.get_by_text("nightly")).to_be_visible()
    page.get_by_role("button", name="Schedule", exact=True).click()
    page.get_by_role("spinbutton").fill("45")
    page.get_by_role("button", name="Save").click()

    def schedules() -> Any:
        with up.client() as client:
            found = client.read_deployment_by_name("pretrain/pretrain").schedules
        return [s for s in found if getattr(s.schedule, "interval", None)]

    (made,) = until(schedules, "the page has made a schedule", 30)
    assert (made.schedule.interval.total_seconds(), made.active) == (45 * 60, True)


def test_the_loss_curve_is_found(up: Up, page: Page) -> None:
    page.goto(run_page(up, ""))
    page.get_by_text("Model metrics", exact=True).click()
    expect(page.get_by_text("loss", exact=True).first).to_be_visible()
    expect(page.get_by_text("chaos (train/loss)")).to_be_visible()
    expect(page.locator("path.js-line").first).to_be_visible()


def test_a_checkpoint_is_found_with_its_files(up: Up, page: Page) -> None:
    page.goto(run_page(up, ""))
    page.get_by_text("Artifacts", exact=True).click()
    for name in ("checkpoints", "step-00000012", "attempt-0001"):
        page.get_by_text(name, exact=True).click()
    expect(page.get_by_text("COMMIT.json", exact=True)).to_be_visible()
    page.get_by_text("COMMIT.json", exact=True).click()
    expect(page.get_by_text('"format_version"').first).to_be_visible()


def test_the_champion_is_found(up: Up, page: Page) -> None:
    page.goto(f"{up.mlflow}/#/experiments?workflowType=machine_learning")
    page.get_by_text("Model registry", exact=True).click()
    page.get_by_role("button", name="Try it now").click()  # MLflow shows its aliases to a new visitor
    row = page.get_by_role("row", name="chaos")
    expect(row.get_by_text("champion")).to_be_visible()
    row.get_by_role("link", name="chaos", exact=True).click()
    expect(page.get_by_role("link", name="Version 1").first).to_be_visible()
