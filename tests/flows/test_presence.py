"""Whether the process of a flow run lives, as the store shows it."""

import dataclasses
import os
import subprocess
import sys
import threading

import pytest

from flows.presence import abandoned_runs, presence_key, presences, present, run_of, works_on
from headrace.lease import LeaseHolder, read_holder
from headrace.process import machine_id, start_time
from headrace.storage import Storage, json_document
from tasks.runs import lease_key

ELSEWHERE = LeaseHolder(holder="h", host="other", machine="other/boot/ns", pid=7, start_time=1, beat=3)


@pytest.fixture
def storage(tmp_path):
    return Storage.open(str(tmp_path / "store"))


@pytest.fixture
def of_deployment(monkeypatch):
    monkeypatch.setattr("flows.presence.flow_run.get_id", lambda: "run-1")
    monkeypatch.setattr("flows.presence.deployment.get_id", lambda: "deployment-1")


def leave(storage, flow_run_id, holder):
    storage.write_bytes(presence_key(flow_run_id), json_document(dataclasses.asdict(holder)))


def test_a_flow_run_of_a_deployment_is_present_while_it_works(storage, of_deployment):
    with present(storage):
        assert presences({"run-1": storage}, 5.0) == {"run-1": "alive"}
        works_on(storage, "abc")
    assert presences({"run-1": storage}, 5.0) == {"run-1": "absent"}
    assert run_of(storage, "run-1") == "abc"
    assert run_of(storage, "run-2") is None


def test_a_command_on_a_terminal_leaves_nothing(storage, monkeypatch):
    monkeypatch.setattr("flows.presence.flow_run.get_id", lambda: "run-1")
    monkeypatch.setattr("flows.presence.deployment.get_id", lambda: None)
    with present(storage):
        works_on(storage, "abc")
        assert storage.list() == []


def test_a_process_of_this_machine_that_ended_is_gone_at_once(storage):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    born = start_time(ended.pid)
    ended.wait()
    leave(storage, "run-1", LeaseHolder("h", "here", machine_id(), ended.pid, born, 0))
    assert presences({"run-1": storage}, 60.0) == {"run-1": "gone"}


def test_a_stopped_process_of_this_machine_lives(storage):
    """It does not beat, but it may wake up at any moment: only its end is an end."""
    leave(storage, "run-1", LeaseHolder("h", "here", machine_id(), os.getpid(), start_time(os.getpid()), 0))
    assert presences({"run-1": storage}, 0.5) == {"run-1": "alive"}


def test_a_process_elsewhere_is_watched_until_it_beats(storage):
    leave(storage, "beats", ELSEWHERE)
    leave(storage, "silent", ELSEWHERE)
    leave(storage, "ends", ELSEWHERE)

    def beat():
        leave(storage, "beats", dataclasses.replace(ELSEWHERE, beat=4))
        storage.delete(presence_key("ends"))

    timer = threading.Timer(0.3, beat)
    timer.start()
    found = presences(dict.fromkeys(["beats", "silent", "ends", "never"], storage), 2.0)
    timer.join()
    assert found == {"beats": "alive", "silent": "silent", "ends": "absent", "never": "absent"}


def test_a_run_is_abandoned_when_its_command_was_killed_here(storage):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    born = start_time(ended.pid)
    ended.wait()
    for run_id, holder in {
        "dead": LeaseHolder("h", "here", machine_id(), ended.pid, born, 0),
        "here": LeaseHolder("h", "here", machine_id(), os.getpid(), start_time(os.getpid()), 0),
        "elsewhere": ELSEWHERE,
    }.items():
        storage.write_bytes(lease_key(run_id), json_document(dataclasses.asdict(holder)))
    leave(storage, "a-flow-run", ELSEWHERE)
    assert abandoned_runs(storage) == ["dead"]


def test_what_lies_there_and_says_nothing_is_no_holder(storage):
    storage.write_bytes("leases/flow-x", b"{}")
    assert read_holder(storage, "leases/flow-x") is None
    assert read_holder(storage, "leases/flow-y") is None
