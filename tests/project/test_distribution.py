"""What is installed is ours, whole, and nothing more; what we import is declared, and what we declare is imported."""

import ast
import importlib.metadata
import importlib.util
import json
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("headrace", "data_prep", "training", "tasks", "flows")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
NOT_PINNED = {"headrace", "pip", "setuptools", "wheel"}

DISTRIBUTION_OF = {
    "yaml": "pyyaml",
    # the errors and types of these are part of what the declared package gives us
    "pydantic_core": "pydantic",
    "aiobotocore": "s3fs",
    "aiohttp": "s3fs",
    "botocore": "s3fs",
    "httpx": "prefect",
}


@pytest.mark.parametrize("package", PACKAGES)
def test_each_package_resolves_inside_this_distribution(package: str):
    spec = importlib.util.find_spec(package)
    assert spec is not None, f"{package} is not installed"
    assert spec.origin is not None, f"{package} has no __init__.py"
    origin = Path(spec.origin).resolve()

    assert origin in {root / package / "__init__.py" for root in installed_roots()}


def installed_roots() -> set[Path]:
    """Where the distribution's packages are: site-packages, or this checkout when it is installed as editable."""
    distribution = importlib.metadata.distribution("headrace")
    direct = json.loads(distribution.read_text("direct_url.json") or "{}")
    if direct.get("dir_info", {}).get("editable"):
        return {Path(unquote(urlsplit(direct["url"]).path)).resolve()}
    return {Path(str(distribution.locate_file(""))).resolve()}


@pytest.mark.parametrize("package", PACKAGES)
def test_no_other_distribution_ships_a_package_of_this_name(package: str):
    owners = importlib.metadata.packages_distributions().get(package, [])

    assert set(owners) <= {"headrace"}, f"{owners} would overwrite {package}/ silently"


def test_the_init_files_are_empty():
    filled = [str(p) for package in PACKAGES for p in (ROOT / package).rglob("__init__.py") if p.read_text().strip()]

    assert filled == []


def test_every_folder_of_modules_is_a_package():
    bare = {
        str(module.parent.relative_to(ROOT))
        for package in PACKAGES
        for module in (ROOT / package).rglob("*.py")
        if not (module.parent / "__init__.py").exists()
    }

    assert bare == set(), "hatchling takes them, but mypy and import-linter do not see them"


def test_no_test_folder_is_a_package():
    assert list((ROOT / "tests").rglob("__init__.py")) == [], "tests/training/__init__.py would shadow training"


def test_the_wheel_holds_the_five_packages_and_nothing_else(tmp_path: Path):
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path)],
        cwd=ROOT,
        check=True,
        capture_output=True,
        timeout=120,
    )
    (wheel,) = tmp_path.glob("headrace-*.whl")
    names = zipfile.ZipFile(wheel).namelist()

    metadata = f"headrace-{PROJECT['version']}.dist-info"
    assert {name.split("/")[0] for name in names} == {*PACKAGES, metadata}
    assert f"{metadata}/licenses/LICENSE" in names
    expected = {str(p.relative_to(ROOT)) for package in PACKAGES for p in (ROOT / package).rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == expected
    data = {name for name in names if name.startswith("flows/") and not name.endswith(".py")}
    automations = {f"flows/{path.relative_to(ROOT)}" for path in (ROOT / "deployments/automations").glob("*.yaml")}
    assert data == {"flows/deployments/prefect.yaml", *automations}


def test_the_console_script_is_the_command_line():
    (entry,) = importlib.metadata.entry_points(group="console_scripts", name="headrace")

    assert entry.value == "flows.cli:main"
    assert callable(entry.load())


def test_what_is_imported_is_declared_and_what_is_declared_is_imported():
    declared = {canonicalize_name(Requirement(text).name) for text in PROJECT["dependencies"]}
    imported = {
        canonicalize_name(DISTRIBUTION_OF.get(name, name))
        for package in PACKAGES
        for module in (ROOT / package).rglob("*.py")
        for name in third_party_imports(module)
    }

    assert imported - declared == set(), "imported, but only there by luck: declare it in pyproject.toml"
    assert declared - imported == set(), "declared, but nothing imports it: remove it"


def third_party_imports(module: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "import_module":
            found |= {str(a.value) for a in node.args if isinstance(a, ast.Constant)}
    return {name.split(".")[0] for name in found} - set(PACKAGES) - sys.stdlib_module_names


def test_every_dependency_has_its_row_in_the_decision():
    decision = (ROOT / "docs/decisions/0003-dependencies.md").read_text(encoding="utf-8")
    named = [Requirement(text).name for text in PROJECT["dependencies"]]

    assert [name for name in named if not re.search(rf"\b{name}\b", decision)] == []


# ------------------------------------------------------------------------------------------------------ constraints


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in pairs}


def test_the_constraints_are_exact_sorted_and_without_addresses():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    entries = [line for line in lines if not line.startswith("#")]

    assert [e for e in entries if not re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+", e)] == []
    assert entries == sorted(entries, key=str.lower)
    assert NOT_PINNED.isdisjoint(pins())
    assert pins()["torch"] == "2.13.0"


def test_the_constraints_pin_all_that_the_project_and_its_tests_bring():
    needed = closure("headrace", {"dev"}) - NOT_PINNED

    assert needed - set(pins()) == set(), "add them to constraints.txt"
    wrong = {
        name: (importlib.metadata.version(name), pins()[name])
        for name in needed
        if Version(importlib.metadata.version(name)).public != pins()[name]
    }
    assert wrong == {}, "installed and pinned versions differ: run `make install-dev` in a new environment"


def closure(name: str, extras: set[str]) -> set[str]:
    """All distributions that installing `name` with `extras` brings on this machine."""
    found: set[str] = set()
    queue = [(name, frozenset(extras))]
    seen: set[tuple[str, frozenset[str]]] = set()
    while queue:
        current, wanted = queue.pop()
        if (current, wanted) in seen:
            continue
        seen.add((current, wanted))
        found.add(current)
        for text in importlib.metadata.requires(current) or []:
            requirement = Requirement(text)
            if applies(requirement, wanted):
                queue.append((canonicalize_name(requirement.name), frozenset(requirement.extras)))
    return found


def applies(requirement: Requirement, extras: frozenset[str]) -> bool:
    environment = {**default_environment(), "extra": ""}
    return requirement.marker is None or any(
        requirement.marker.evaluate({**environment, "extra": extra}) for extra in {"", *extras}
    )
