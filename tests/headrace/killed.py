"""A process that is killed while it writes a file."""

import subprocess
import sys
from pathlib import Path

KILLED = """
import os, pathlib, sys
from headrace.local_store import complete_file
with complete_file(pathlib.Path(sys.argv[1]), "write") as file:
    file.write(b"x")
    os.kill(os.getpid(), 9)
"""


def killed_while_writing(path: Path) -> str:
    """Leave what such a process leaves beside `path`; return the name of that file."""
    before = set(path.parent.glob(".headrace-tmp-*"))
    assert subprocess.run([sys.executable, "-c", KILLED, str(path)], check=False).returncode == -9
    (left,) = set(path.parent.glob(".headrace-tmp-*")) - before
    return left.name
