"""A SQLite database with MLflow's tables, made once in a session: making one takes seconds."""

import atexit
import functools
import shutil
import tempfile
from pathlib import Path

from headrace.tracking import Tracker

NOLOAD = "ignore:The ``noload`` loader strategy:DeprecationWarning"
"""MLflow's own use of SQLAlchemy, for `pytest.mark.filterwarnings`; nothing that we could change."""


@functools.cache
def _migrated() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="headrace-test-mlflow-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    Tracker.connect(f"sqlite:///{folder}/mlflow.db")
    return folder / "mlflow.db"


def new_database(folder: Path) -> Path:
    """A fresh database in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copy(_migrated(), folder / "mlflow.db"))
