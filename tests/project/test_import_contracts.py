"""The arrows between the layers, and what loads when a module is imported."""

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("headrace", "data_prep", "training", "tasks", "flows")

# Who may name these, also through importlib, which import-linter does not see. A trailing dot means the whole package.
OWNERS = {
    "mlflow": ("headrace.tracking", "headrace.tracking_errors", "headrace.mlmodel"),
    "prefect": ("tasks.", "flows."),
    "torch": ("training.",),
    "webdataset": ("data_prep.shards",),
    "fsspec": ("headrace.s3_client",),
    "s3fs": ("headrace.s3_client",),
}
# The first import of each takes from a tenth of a second to several; the command line must answer before that.
HEAVY = ("torch", "mlflow", "prefect", "s3fs", "transformers", "webdataset", "pandas", "tokenizers")

TORCH_FREE = (
    "training.config",
    "training.run_spec",
    "training.model.config",
    "training.optim.config",
    "training.parallel.config",
    "training.checkpoint.config",
    "training.checkpoint.catalog",
    "training.checkpoint.garbage",
    "training.checkpoint.keeper",
    "training.checkpoint.verify",
    "training.launch.agent",
    "training.launch.attempts",
    "training.launch.supervisor",
    "training.evaluation.config",
    "training.evaluation.spec",
    "training.evaluation.baselines",
)


def test_the_contracts_hold():
    call = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    done = subprocess.run(
        [sys.executable, "-c", call, "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 broken" in done.stdout


@pytest.mark.parametrize("library", OWNERS)
def test_a_library_is_named_only_where_it_belongs(library: str):
    elsewhere = sorted(
        module
        for package in PACKAGES
        for file in (ROOT / package).rglob("*.py")
        if library in loaded_names(file) and not may_name(module := module_name(file), OWNERS[library])
    )

    assert elsewhere == []


def may_name(module: str, owners: tuple[str, ...]) -> bool:
    return any(module.startswith(owner) if owner.endswith(".") else module == owner for owner in owners)


def module_name(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts)


@functools.cache
def loaded_names(file: Path) -> set[str]:
    """Top-level names of everything that a module imports when it runs, by statement or by a literal to importlib."""
    found: set[str] = set()
    for node in running_nodes(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.split(".")[0])
        elif isinstance(node, ast.Call) and "import" in ast.unparse(node.func):
            found |= {str(a.value).split(".")[0] for a in node.args if isinstance(a, ast.Constant)}
    return found


def running_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node but those below `if TYPE_CHECKING`, which load nothing."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        yield node
        yield from running_nodes(node)


def test_the_command_line_starts_light():
    assert loaded_by("flows.cli", HEAVY) == []


def test_the_flows_load_no_torch():
    modules = modules_of("flows") + modules_of("tasks")

    assert loaded_by(", ".join(modules), ("torch", "transformers")) == []


def test_what_the_launcher_and_the_forms_import_loads_no_torch():
    assert loaded_by(", ".join(TORCH_FREE), ("torch", "transformers", "prefect", "mlflow")) == []


def test_the_data_stage_loads_no_torch():
    assert loaded_by(", ".join(modules_of("data_prep")), ("torch", "webdataset", "prefect", "mlflow")) == []


def test_a_rank_loads_neither_prefect_nor_mlflow():
    assert loaded_by("training.main", ("prefect", "mlflow", "s3fs")) == []


def modules_of(package: str) -> list[str]:
    return [module_name(file) for file in sorted((ROOT / package).rglob("[a-z]*.py"))]


def loaded_by(modules: str, watched: tuple[str, ...]) -> list[str]:
    """Which of the watched libraries a new interpreter has loaded after importing these modules."""
    code = f"import sys, {modules}; print(*[name for name in {watched!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()
