"""Stage processes: what they report, how they fail, and that none outlives us."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from headrace.errors import AttemptFailed, InputError, Terminal
from headrace.process import pid_alive
from tasks.child import command_of, run_module

ROOT = Path(__file__).parents[2]
WAIT_SECONDS = 30


@pytest.fixture
def module(tmp_path, monkeypatch):
    """`module(text)`: the name of a module with this source, importable by children."""
    folder = tmp_path / "modules"
    folder.mkdir()
    monkeypatch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{ROOT}")

    def make(text: str) -> str:
        (folder / "a_stage.py").write_text(text)
        return "a_stage"

    return make


def test_reports_arrive_and_the_last_one_is_the_result(module, tmp_path):
    name = module(
        "import json, sys\n"
        "spec = json.load(open(sys.argv[1]))\n"
        "print(json.dumps({'progress': 1, 'total': 2}), flush=True)\n"
        "print('a library says hello')\n"
        "print('[1, 2]')\n"
        "print(json.dumps({'answer': spec['question'] * 2, 'name': __name__, 'arguments': len(sys.argv)}))\n"
    )
    reports = []
    result = run_module(name, {"question": 21}, folder=tmp_path / "work", on_report=reports.append)
    assert result == {"answer": 42, "name": "__main__", "arguments": 2}
    assert reports == [{"progress": 1, "total": 2}, result]
    assert json.loads((tmp_path / "work" / "spec.json").read_text()) == {"question": 21}


def test_a_failure_says_what_the_stage_said(module, tmp_path):
    name = module(
        "import json, sys\nprint(json.dumps({'error': 'the disk is full', 'retryable': False}))\nsys.exit(1)\n"
    )
    with pytest.raises(Terminal, match=r"a_stage failed: the disk is full Log: .*log\.txt"):
        run_module(name, {}, folder=tmp_path, on_report=lambda _: None)


def test_a_failure_that_another_try_may_cure(module, tmp_path):
    name = module("import json, sys\nprint(json.dumps({'error': 'away', 'retryable': True}))\nsys.exit(1)\n")
    with pytest.raises(AttemptFailed, match="away"):
        run_module(name, {}, folder=tmp_path, on_report=lambda _: None)


def test_refused_input_keeps_its_exit_code(module, tmp_path):
    name = module("import json, sys\nprint(json.dumps({'error': 'no such model', 'retryable': False}))\nsys.exit(2)\n")
    with pytest.raises(InputError, match=r"^no such model$") as caught:
        run_module(name, {}, folder=tmp_path, on_report=lambda _: None)
    assert caught.value.exit_code == 2


def test_a_defect_shows_its_last_line(module, tmp_path):
    name = module("raise ValueError('what was not expected')\n")
    with pytest.raises(Terminal, match="ValueError: what was not expected"):
        run_module(name, {}, folder=tmp_path, on_report=lambda _: None)


def test_a_killed_stage_may_be_tried_again(module, tmp_path):
    name = module("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    with pytest.raises(AttemptFailed, match=r"killed by SIGKILL .*memory"):
        run_module(name, {}, folder=tmp_path, on_report=lambda _: None)


SLEEPER = (
    "import json, os, signal, sys, time\n"
    "ignore = json.load(open(sys.argv[1])).get('ignore')\n"
    "if ignore: signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "print(json.dumps({'pid': os.getpid()}), flush=True)\n"
    "time.sleep(600)\n"
)


@pytest.mark.parametrize("ignore", [False, True])
def test_no_child_is_left_when_an_exception_passes(module, tmp_path, monkeypatch, ignore):
    monkeypatch.setattr("tasks.child.GRACE_SECONDS", 0.3)
    pids = []

    def interrupt(report):
        pids.append(report["pid"])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_module(module(SLEEPER), {"ignore": ignore}, folder=tmp_path, on_report=interrupt)
    assert not pid_alive(pids[0])


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_a_child_ends_with_a_killed_parent(module, tmp_path, end):
    name = module(SLEEPER)
    (tmp_path / "spec.json").write_text("{}")
    code = (
        "import signal, subprocess\n"
        "from tasks.child import command_of\n"
        f"command = command_of({name!r}, {str(tmp_path / 'spec.json')!r}, end=signal.{end.name})\n"
        "subprocess.Popen(command).wait()\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = json.loads(parent.stdout.readline())["pid"]
    assert pid_alive(pid)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + WAIT_SECONDS
    while pid_alive(pid):
        assert time.monotonic() < deadline, "the child outlives its parent"
        time.sleep(0.02)


def test_a_child_whose_parent_is_gone_already_ends_at_once(module, tmp_path):
    command = command_of(module("print('never')\n"), "x")
    command[3] = "1"  # as if our process id had been this
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL
    assert done.stdout == ""


def test_the_command_is_a_list_of_words():
    command = command_of("a.module", "; touch x", "$(y)")
    assert command[:3] == [sys.executable, "-m", "tasks.child"]
    assert command[3:] == [str(os.getpid()), "SIGKILL", "a.module", "; touch x", "$(y)"]


def test_what_the_stage_logs_does_not_mix_with_its_reports(module, tmp_path):
    name = module("import sys\nprint('{\"wrong\": 1}', file=sys.stderr)\nprint('{\"right\": 1}')\n")
    assert run_module(name, {}, folder=tmp_path, on_report=lambda _: None) == {"right": 1}
    assert (tmp_path / "log.txt").read_text() == '{"wrong": 1}\n'


def test_many_reports_do_not_block_the_stage(module, tmp_path):
    name = module('for i in range(20000): print(\'{"progress": %d, "total": 20000}\' % i)\n')
    seen = []
    thread = threading.Thread(
        target=lambda: run_module(name, {}, folder=tmp_path, on_report=lambda report: seen.append(report["progress"]))
    )
    # The kernel watches the thread that started a child: it must live as long as the child, as this one does.
    thread.start()
    thread.join(WAIT_SECONDS)
    assert seen == list(range(20000))
