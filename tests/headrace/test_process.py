"""Ending processes for certain: sessions of their own, orphans, deaf ones, and process ids that were used again."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace import process
from headrace.process import descendants, machine_id, pid_alive, start_time

WAIT_SECONDS = 60


@contextlib.contextmanager
def script(source: str) -> Iterator[subprocess.Popen[str]]:
    """A Python process that is certainly gone at the end."""
    started = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(source)], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    with started:
        try:
            yield started
        finally:
            started.kill()


def line(started: subprocess.Popen[str]) -> Any:
    assert started.stdout is not None
    return json.loads(started.stdout.readline())


def eventually(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def test_alive():
    me = os.getpid()
    born = start_time(me)
    assert born is not None
    assert pid_alive(me)
    assert pid_alive(me, born)
    assert not pid_alive(me, born + 1)  # another process with the same id
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    assert eventually(lambda: not pid_alive(child.pid))  # a zombie until it is collected
    assert start_time(child.pid) is not None
    child.wait()
    assert start_time(child.pid) is None
    assert not pid_alive(child.pid)


def test_names_of_processes_may_hold_anything():
    with script("""
        import ctypes, time
        ctypes.CDLL(None).prctl(15, b"x) R 1 (y", 0, 0, 0)  # PR_SET_NAME
        print("1", flush=True)
        time.sleep(60)
    """) as child:
        line(child)
        assert Path(f"/proc/{child.pid}/comm").read_text() == "x) R 1 (y\n"
        assert pid_alive(child.pid)
        assert child.pid in descendants(os.getpid())


def test_descendants_are_found_over_sessions():
    with script("""
        import json, os, subprocess, sys, time
        inner = "import time; time.sleep(60)"
        middle = f"import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', {inner!r}], "
        middle += "start_new_session=True); print(p.pid, flush=True); time.sleep(60)"
        p = subprocess.Popen([sys.executable, "-c", middle], start_new_session=True, stdout=subprocess.PIPE, text=True)
        grandchild = int(p.stdout.readline())
        print(json.dumps([p.pid, grandchild]), flush=True)
        time.sleep(60)
    """) as parent:
        child, grandchild = line(parent)
        assert descendants(parent.pid) == [child, grandchild]
        assert descendants(grandchild) == []
        assert {parent.pid, child, grandchild} <= set(descendants(os.getpid()))
        for pid in (grandchild, child):
            os.kill(pid, signal.SIGKILL)


DEAF = "import signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(60)"
POLITE = (
    "import signal, sys, time\n"
    "signal.signal(signal.SIGTERM, lambda *_: (open({path!r}, 'w').close(), sys.exit(0)))\n"
    "print(1, flush=True)\ntime.sleep(60)"
)


def test_kill_descendants(tmp_path: Path):
    """A tree as torchrun makes it: own sessions, one rank deaf, one stopped, one an orphan, one that cleans up."""
    saved = str(tmp_path / "saved")
    with script(f"""
        import json, os, signal, subprocess, sys
        from headrace.process import become_subreaper, descendants, kill_descendants, start_time

        def start(source, **kwargs):
            child = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True,
                                     start_new_session=True, **kwargs)
            return child, child.stdout.readline()

        become_subreaper()
        deaf, _ = start({DEAF!r})
        polite, _ = start({POLITE.format(path=saved)!r})
        stopped, _ = start("import time; print(1, flush=True); time.sleep(60)")
        os.kill(stopped.pid, signal.SIGSTOP)
        # its parent ends at once; without the subreaper it would hang below init
        source = "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {DEAF!r}], "
        leader, orphan = start(source + "start_new_session=True); print(p.pid, flush=True)")
        leader.wait()
        pids = [deaf.pid, polite.pid, stopped.pid, int(orphan)]
        assert set(pids) <= set(descendants(os.getpid()))
        born = {{pid: start_time(pid) for pid in pids}}
        kill_descendants(os.getpid(), 0.5)
        left = descendants(os.getpid())
        codes = [deaf.wait(), polite.wait(), stopped.wait()]
        print(json.dumps([pids, left, codes]), flush=True)
    """) as agent:
        pids, left, codes = line(agent)
        assert left == []
        assert codes == [-signal.SIGKILL, 0, -signal.SIGKILL]
        assert Path(saved).exists()
        for pid in pids:
            assert not pid_alive(pid)
        assert agent.wait(WAIT_SECONDS) == 0


def test_kill_descendants_of_nobody():
    with script("""
        import os
        from headrace.process import kill_descendants
        kill_descendants(os.getpid(), 5)
        print("true", flush=True)
    """) as lonely:
        assert line(lonely) is True


def test_processes_that_appear_while_others_end():
    """A launcher that answers SIGTERM by starting yet another process."""
    with script("""
        import json, os, subprocess, sys
        from headrace.process import become_subreaper, descendants, kill_descendants
        become_subreaper()
        source = '''
        import signal, subprocess, sys, time
        def again(*_):
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
            sys.exit(0)
        signal.signal(signal.SIGTERM, again)
        print(1, flush=True)
        time.sleep(60)
        '''.replace("\\n        ", "\\n")
        child = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True)
        child.stdout.readline()
        kill_descendants(os.getpid(), 0.5)
        print(json.dumps([child.wait(), descendants(os.getpid())]), flush=True)
    """) as agent:
        assert line(agent) == [0, []]


def test_a_process_id_that_was_used_again_is_not_signalled():
    with script("import time; print(1, flush=True); time.sleep(60)") as bystander:
        line(bystander)
        born = start_time(bystander.pid)
        assert born is not None
        earlier = process._Process(bystander.pid, os.getpid(), born - 1, "S")
        process._signal_all([earlier], signal.SIGKILL)
        assert bystander.poll() is None
        assert pid_alive(bystander.pid, born)
        process._signal_all([process._Process(bystander.pid, os.getpid(), born, "S")], signal.SIGKILL)
        assert bystander.wait(WAIT_SECONDS) == -signal.SIGKILL
    process._signal_all([earlier], signal.SIGKILL)  # gone: no error


def test_neither_init_nor_the_caller_is_ever_signalled(monkeypatch: pytest.MonkeyPatch):
    me = os.getpid()
    processes = [process._Process(pid, 1, 1, "S") for pid in (1, 5, me)]
    monkeypatch.setattr(process, "_living_descendants", lambda pid: processes)
    monkeypatch.setattr(process, "pid_alive", lambda pid, start=None: True)
    known: dict[int, process._Process] = {}
    assert [found.pid for found in process._track(7, known)] == [5]
    assert process._track(5, {}) == []


def test_a_process_that_cannot_be_ended_is_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    stuck = process._Process(4_000_000_000, 1, 1, "D")
    monkeypatch.setattr(process, "_track", lambda pid, known: [stuck])
    monkeypatch.setattr(process, "_signal_all", lambda processes, sig: None)
    monkeypatch.setattr(process, "_KILL_WAIT_SECONDS", 0.0)
    process.kill_descendants(os.getpid(), 0.0)
    assert "Processes [4000000000] did not end after SIGKILL." in caplog.text


def test_children_end_with_their_parent():
    with script("""
        import json, os, subprocess, sys, time
        source = "import os, signal, sys, time; from headrace.process import set_parent_death_signal; "
        source += "set_parent_death_signal(signal.SIGKILL, int(sys.argv[1])); print(1, flush=True); time.sleep(60)"
        child = subprocess.Popen([sys.executable, "-c", source, str(os.getpid())], start_new_session=True,
                                 stdout=subprocess.PIPE)
        child.stdout.readline()
        print(child.pid, flush=True)
        time.sleep(60)
    """) as parent:
        child = line(parent)
        assert pid_alive(child)
        parent.kill()
        assert eventually(lambda: not pid_alive(child))


def test_a_parent_that_ended_before_the_call():
    with script("""
        import os, signal
        from headrace.process import set_parent_death_signal
        set_parent_death_signal(signal.SIGKILL, os.getppid() + 1)
        print("still here", flush=True)
    """) as late:
        assert late.wait(WAIT_SECONDS) == -signal.SIGKILL
        assert late.stdout is not None
        assert late.stdout.read() == ""


def test_a_refused_request_is_an_error():
    with pytest.raises(OSError, match=r"prctl\(1, 9999\): Invalid argument"):
        process.set_parent_death_signal(9999)


def test_machine_id():
    assert machine_id() == machine_id()
    assert len(machine_id().split("/")) == 3
