"""`headrace up` from an installed wheel, without a checkout: the deployments are inside, and a run completes."""

import json
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from mlflow import MlflowClient

from tests.chaos.harness import Lab
from tests.mlflow_database import NOLOAD
from tests.project.documented_commands import ROOT
from tests.services.stack import started_up

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings(NOLOAD)]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with the wheel in it; its dependencies are those of the tests."""
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder))
    (wheel,) = folder.glob("headrace-*.whl")
    run(sys.executable, "-m", "venv", "--without-pip", str(folder / "venv"))
    python = folder / "venv/bin/python"
    packages = Path(run(str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    run(sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", str(packages), str(wheel))
    # A folder that a .pth names is searched, but the .pth files in it are not read: this checkout stays invisible.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"), encoding="utf-8")
    return python


def run(*command: str) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_wheel_is_what_runs(python: Path, tmp_path: Path) -> None:
    code = (
        "import flows.cli, training, tasks, data_prep, headrace; from flows.deployments import folder; print(folder())"
    )
    done = subprocess.run([python, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert Path(done.stdout.strip()).parent.parent.parent.parent == python.parents[1] / "lib"


def test_everything_starts_and_a_run_completes(python: Path, local_lab: Lab) -> None:
    with started_up(local_lab, command=[str(python), "-m", "flows.cli"], folder=local_lab.folder) as up:
        assert "pretrain/pretrain" in {deployment["name"] for deployment in up.status()["deployments"]}
        flow_run = up.run_deployment("pretrain/pretrain", local_lab.config)
        assert up.ended(flow_run) == "Completed"
        used = {p.cmdline()[0] for p in up.processes() if "python" in p.cmdline()[0]}
        assert used == {str(python)}
        version = MlflowClient(up.mlflow).get_model_version_by_alias("chaos", "champion")
    attempt = json.loads(next(local_lab.store.glob("runs/*/artifacts/attempts/*.json")).read_text(encoding="utf-8"))
    assert attempt["versions"]["headrace"]
    assert version.version == "1"
