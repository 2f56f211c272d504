"""Where the state of this machine lies, and which code runs here."""

import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
from pathlib import Path

from headrace.errors import ConfigError

HOME_VARIABLE = "HEADRACE_HOME"
PACKAGES = ("data_prep", "flows", "headrace", "tasks", "training")

_REPORTED_DISTRIBUTIONS = (
    "fsspec",
    "headrace",
    "mlflow",
    "numpy",
    "prefect",
    "pydantic",
    "s3fs",
    "safetensors",
    "tokenizers",
    "torch",
    "webdataset",
)


def home() -> Path:
    """Return the absolute folder of the local state: HEADRACE_HOME, or `.headrace` in the working directory.

    The folder need not exist. Raises ConfigError when the variable holds a URL or a file.
    """
    value = os.environ.get(HOME_VARIABLE) or ".headrace"
    if "://" in value:
        raise ConfigError(
            f"{HOME_VARIABLE} is {value!r}, but it must be a folder on this machine. Unset it or give a path; to keep "
            "data in an object store, set storage.root instead."
        )
    path = Path(value).expanduser().absolute()
    if path.exists() and not path.is_dir():
        raise ConfigError(f"{HOME_VARIABLE} is {path}, which is not a folder. Name a folder; it need not exist.")
    return path


def store_path() -> Path:
    """Return the root of the default store."""
    return home() / "store"


def mlflow_database() -> Path:
    """Return the file of the default MLflow database."""
    return home() / "mlflow.db"


def prefect_home() -> Path:
    """Return the folder that stands in for the user's own Prefect profile."""
    return home() / "prefect"


def work_path() -> Path:
    """Return the folder for scratch files of runs: logs, heartbeats, caches. Nothing there is the only copy."""
    return home() / "work"


@functools.cache
def code_digest() -> str:
    """Return the SHA-256 over the names and contents of all installed Python sources of our packages.

    Recorded with each attempt. Packages are located, not imported.
    """
    total = hashlib.sha256()
    for package in PACKAGES:
        for root in _package_folders(package):
            for path in sorted(root.rglob("*.py")):
                name = f"{package}/{path.relative_to(root).as_posix()}"
                digest = hashlib.sha256(path.read_bytes()).hexdigest()
                total.update(f"{name}\0{digest}\n".encode())
    return total.hexdigest()


def versions() -> dict[str, str]:
    """Return the versions of Python and of the distributions that can change a result; missing ones are left out."""
    found = {"python": platform.python_version()}
    for name in _REPORTED_DISTRIBUTIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _package_folders(package: str) -> list[Path]:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.submodule_search_locations is None:
        return []
    return sorted(Path(location) for location in spec.submodule_search_locations)
