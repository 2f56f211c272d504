"""In CI nothing is left out silently: skips of every kind fail the session."""

import os
import subprocess
import sys
from pathlib import Path

from tests.project.documented_commands import ROOT

SKIPS = {
    "mark": "import pytest\n@pytest.mark.skip(reason='why-mark')\ndef test_one(): ...\n",
    "call": "import pytest\ndef test_one():\n    pytest.skip('why-call')\n",
    "fixture": "import pytest\n@pytest.fixture\ndef it():\n    pytest.skip('why-fixture')\ndef test_one(it): ...\n",
    "module": "import pytest\npytest.skip('why-module', allow_module_level=True)\n",
    "import": "import pytest\npytest.importorskip('no_such_module', reason='why-import')\n",
    "expected": "import pytest\n@pytest.mark.xfail(reason='why-expected')\ndef test_one():\n    assert 1 == 2\n",
}


def pytest_on(folder: Path, **sources: str) -> "subprocess.CompletedProcess[str]":
    """Run test files of their own with the plugin."""
    for name, source in sources.items():
        (folder / f"test_{name}.py").write_text(source, encoding="utf-8")
    options = ["-p", "tests.ci_plugin", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
    command = [sys.executable, "-m", "pytest", *options, "--rootdir", str(folder), str(folder)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


def test_a_skip_of_any_kind_fails_with_its_reason(tmp_path: Path):
    done = pytest_on(tmp_path, **SKIPS)

    assert done.returncode == 1
    assert [kind for kind in SKIPS if f"a skip is a failure in CI: why-{kind}" not in done.stdout] == []
    assert "2 failed, 4 errors in " in done.stdout  # four never came as far as their call


def test_each_kind_alone_fails_the_session(tmp_path: Path):
    for kind in ("mark", "expected"):
        folder = tmp_path / kind
        folder.mkdir()
        assert pytest_on(folder, **{kind: SKIPS[kind]}).returncode == 1, kind


def test_passing_stays_passing(tmp_path: Path):
    done = pytest_on(tmp_path, passing="def test_one(): ...\n")

    assert done.returncode == 0
    assert "1 passed in " in done.stdout


def test_make_loads_the_plugin_in_ci_only():
    assert "-p tests.ci_plugin" in planned(CI="true")
    assert "tests.ci_plugin" not in planned()


def planned(**environment: str) -> str:
    kept = {name: value for name, value in os.environ.items() if name not in ("CI", "MAKEFLAGS", "MAKELEVEL")}
    return subprocess.run(
        ["make", "--dry-run", "test"],
        cwd=ROOT,
        env={**kept, **environment},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
