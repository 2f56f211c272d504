"""What must not be in a tracked file, and what must."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SELF = "tests/project/test_tree.py"
TEXT = {".py", ".md", ".toml", ".yaml", ".yml", ".txt", ".cfg", ".ini", ".sh", ".json", ""}

FORBIDDEN = {
    "unfinished work": r"\b(TODO|FIXME|XXX|HACK)\b",
    "a folder of one machine": r"(?<![\w.])/(work|root|home/\w+)/",
    "a fixed temporary folder": r"(?<![\w.])/tmp/[a-z]+/",
    "a package index": r"--(extra-)?index-url|--trusted-host|\bpypi\.org\b|registry\.npmjs|files\.pythonhosted",
    "a private address": r"\b(10\.\d+|192\.168|172\.(1[6-9]|2\d|3[01]))\.\d+\.\d+\b",
    "a key": r"AKIA[0-9A-Z]{16}|-----BEGIN [A-Z ]*PRIVATE KEY",
}
UNSAFE = r"yaml\.(unsafe_)?load\((?!.*Loader=_ClosedLoader)|weights_only=False|pickle\.loads?\(|shell=True|\beval\("


def tracked() -> list[str]:
    """Tracked files, and new ones that git does not ignore."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    return [name for name in listed.stdout.splitlines() if (ROOT / name).is_file() and name != SELF]


FILES = [name for name in tracked() if Path(name).suffix in TEXT]


def lines_with(pattern: str, names: list[str]) -> list[str]:
    rule = re.compile(pattern)
    return [
        f"{name}:{number}: {line.strip()[:100]}"
        for name in names
        for number, line in enumerate((ROOT / name).read_text(encoding="utf-8").splitlines(), 1)
        if rule.search(line)
    ]


@pytest.mark.parametrize("what", FORBIDDEN)
def test_no_tracked_file_holds(what: str):
    assert lines_with(FORBIDDEN[what], FILES) == []


def test_the_packages_make_no_unsafe_call():
    ours = [name for name in FILES if re.match(r"(headrace|data_prep|training|tasks|flows)/.*\.py$", name)]

    assert ours != []
    assert lines_with(UNSAFE, ours) == []


def test_nothing_large_or_generated_is_tracked():
    generated = (".pyc", ".db", ".tar", ".whl")

    assert [name for name in tracked() if name.endswith(generated)] == []
    assert [name for name in tracked() if (ROOT / name).stat().st_size > 1_000_000] == []


def test_the_rooms_are_there():
    rooms = ["headrace", "data_prep", "training", "tasks", "flows", "configs", "tests", "benchmarks", "docs/decisions"]
    files = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "Makefile", "constraints.txt", ".ci/run"]

    assert [room for room in rooms if not (ROOT / room).is_dir()] == []
    assert [file for file in files if not (ROOT / file).is_file()] == []


def test_ci_can_run_its_script():
    assert (ROOT / ".ci/run").stat().st_mode & 0o111, ".ci/run must be executable"
    subprocess.run(["bash", "-n", ".ci/run"], cwd=ROOT, check=True)
