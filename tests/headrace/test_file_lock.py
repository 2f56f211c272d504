"""One process at a time, and a killed one is no obstacle."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from headrace.file_lock import FileLock, locked

HOLDER = (
    "import sys, time\nfrom pathlib import Path\nfrom headrace.file_lock import FileLock\n"
    "lock = FileLock(Path(sys.argv[1])); lock.acquire(); print('held', flush=True); time.sleep(600)\n"
)
WAIT_SECONDS = 30


def test_others_wait_until_it_is_given_back(tmp_path):
    order: list[str] = []
    first = FileLock(tmp_path / "new" / "lock")
    first.acquire()

    def second() -> None:
        with locked(tmp_path / "new" / "lock"):
            order.append("second")

    thread = threading.Thread(target=second)
    thread.start()
    thread.join(0.1)
    order.append("first")
    first.release()
    first.release()
    thread.join(WAIT_SECONDS)
    assert order == ["first", "second"]


def test_it_is_given_back_when_an_exception_passes(tmp_path):
    with pytest.raises(ValueError, match="x"), locked(tmp_path / "lock"):
        raise ValueError("x")
    with locked(tmp_path / "lock"):
        pass


def test_a_killed_process_gives_it_back_also_when_its_children_live(tmp_path):
    code = HOLDER.replace("print(", "import subprocess; child = subprocess.Popen(['sleep', '60']); print(child.pid, ")
    holder = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "lock")], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    child = int(holder.stdout.readline().split()[0])
    try:
        holder.kill()
        holder.wait()
        with locked(tmp_path / "lock"):
            assert Path(f"/proc/{child}").exists()
    finally:
        os.kill(child, signal.SIGKILL)
        holder.stdout.close()
