"""The documents say what the code does: every field, every command, every link."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

from headrace import errors
from tests.project.config_reference import GUIDE, keys, rewritten
from tests.project.documented_commands import ROOT, Command, documented
from training.launch.attempts import AttemptRecord
from training.run_spec import AttemptSpec, RunSpec

DECISIONS = sorted((ROOT / "docs/decisions").glob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
PACKAGES = ("headrace", "data_prep", "training", "tasks", "flows")


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_the_tables_of_the_guide_are_fresh():
    guide = GUIDE.read_text(encoding="utf-8")

    assert guide == rewritten(guide), "the config classes changed: run `make docs`"


def test_every_config_field_is_in_the_guide():
    guide = GUIDE.read_text(encoding="utf-8")

    assert len(keys()) > 50
    assert [key for key in keys() if f"| `{key}` |" not in guide] == []


@pytest.mark.parametrize("document", [RunSpec, AttemptRecord, AttemptSpec], ids=lambda model: model.__name__)
def test_every_field_of_a_stored_document_is_in_the_formats(document: type):
    formats = read("docs/formats.md")

    assert [name for name in document.model_fields if f"`{name}`" not in formats] == []


def test_every_fault_point_of_the_code_is_documented():
    pattern = re.compile(r"fault_(?:point|factor)\(\s*\"([a-z_.]+)\"")
    points = {p for package in PACKAGES for f in (ROOT / package).rglob("*.py") for p in pattern.findall(f.read_text())}
    documented_points = set(re.findall(r"`([a-z]+\.[a-z_]+)`", read("docs/operations.md").split("Points:")[1]))

    assert points == documented_points


def test_every_event_and_its_fields_are_in_the_formats():
    table = read("docs/formats.md").split("## Events")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`.*?`) \| (.*) \|$", table, re.MULTILINE)
    documented_events = {
        kind: set(re.findall(r"`(\w+)`", fields))
        for kinds, fields in rows
        for kind in re.findall(r"`([a-z._]+)`", kinds)
    }
    written = events_in_code()

    assert written.keys() >= {"step", "evaluation", "save.committed"}
    assert {k: rest for k, f in written.items() if (rest := f - documented_events.get(k, set()))} == {}
    assert written.keys() - documented_events.keys() == set()


def events_in_code() -> dict[str, set[str]]:
    """The events that the training writes, each with the fields that its call names."""
    found: dict[str, set[str]] = {}
    for file in (ROOT / "training").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or ast.unparse(node.func).split(".")[-1] not in ("event", "_event"):
                continue
            if node.args and isinstance(node.args[0], ast.Constant):
                kind = str(node.args[0].value)
                found.setdefault(kind, set()).update(k.arg for k in node.keywords if k.arg)
    return found


def test_every_environment_variable_that_we_read_is_documented():
    pattern = re.compile(r"os\.environ(?:\.get\(|\[)\s*\"([A-Z_0-9]+)\"")
    own = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "PYTHONPATH"}  # set for ranks by torchrun, or handed on to children
    tuning = {"AWS_REQUEST_CHECKSUM_CALCULATION", "AWS_RESPONSE_CHECKSUM_VALIDATION"}  # of the S3 client, not ours
    names = {n for package in PACKAGES for f in (ROOT / package).rglob("*.py") for n in pattern.findall(f.read_text())}

    assert [name for name in sorted(names - own - tuning) if f"`{name}`" not in read("docs/operations.md")] == []


def test_the_exit_codes_are_documented():
    rows = set(re.findall(r"^\| (\d) \|", read("docs/operations.md"), re.MULTILINE))
    classes = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, errors.HeadraceError)]

    assert {"0", *(str(c.exit_code) for c in classes)} == rows


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page: Path):
    links = re.findall(r"\]\((?!https?://|#)([^)#]+)", page.read_text(encoding="utf-8"))

    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_paths_in_code_marks_exist(page: Path):
    pattern = r"`((?:headrace|data_prep|training|tasks|flows|tests|configs|docs|deployments|benchmarks)/[\w./-]*\.\w+)`"
    named = re.findall(pattern, page.read_text(encoding="utf-8"))

    assert [name for name in named if not (ROOT / name).exists()] == []


# -------------------------------------------------------------------------------------------------- changes, decisions


def test_the_changelog_has_what_is_unreleased_first():
    headings = re.findall(r"^## (.+)$", read("CHANGELOG.md"), re.MULTILINE)

    assert headings[0] == "[Unreleased]"
    assert all(re.fullmatch(r"\[\d+\.\d+\.\d+\] - \d{4}-\d{2}-\d{2}", heading) for heading in headings[1:])
    sections = set(re.findall(r"^### (.+)$", read("CHANGELOG.md"), re.MULTILINE))
    assert sections <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def test_decisions_are_numbered_without_a_gap():
    assert [path.name[:4] for path in DECISIONS] == [f"{n:04d}" for n in range(1, len(DECISIONS) + 1)]


@pytest.mark.parametrize("path", DECISIONS, ids=lambda path: path.name[:4])
def test_a_decision_is_one_page_with_its_parts(path: Path):
    text = path.read_text(encoding="utf-8")

    assert text.startswith(f"# {path.name[:4]}: ")
    assert re.search(r"^Date: \d{4}-\d{2}-\d{2}\. Status: (accepted|replaced by \d{4})\.", text, re.MULTILINE)
    assert len(text.splitlines()) <= 60, "a decision is one page"
    if "dependencies" not in path.name:
        assert set(re.findall(r"^## (.+)$", text, re.MULTILINE)) >= {"Question", "Decision", "Why", "What follows"}


# ------------------------------------------------------------------------------------------------------------ commands


@pytest.mark.parametrize("command", documented("make"), ids=str)
def test_a_documented_make_target_exists(command: Command):
    targets = [word for word in command.words[1:] if "=" not in word and not word.startswith("-")]
    done = subprocess.run(["make", "--dry-run", *targets], cwd=ROOT, capture_output=True, text=True, timeout=60)

    assert done.returncode == 0, done.stderr


def test_the_readme_names_the_test_command_that_ci_runs():
    assert Command(("make", "test"), "README.md") in documented("make")
    assert re.search(r"^step test \d+ \d+ make test$", read(".ci/run"), re.MULTILINE)


def test_every_target_of_the_makefile_is_in_its_help():
    makefile = read("Makefile")
    targets = set(re.findall(r"^([a-z][a-z-]*):", makefile, re.MULTILINE)) - {"help", "install", "install-dev"}

    assert targets == set(re.findall(r"make ([a-z-]+)   ", makefile))
