"""The lease makes others wait, is taken over from the dead, and never fails the work it protects."""

import json
import os
import secrets
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from headrace.errors import StorageUnavailable
from headrace.lease import LeaseHolder, hold, hold_if_free
from headrace.process import machine_id, start_time
from headrace.storage import Storage

KEY = "leases/dataset.json"
SOON = 0.01
NEVER = 3600.0


@pytest.fixture
def memory() -> Storage:
    return Storage.open(f"memory://{secrets.token_hex(8)}")


def other(**changes: object) -> LeaseHolder:
    """A living holder on another machine."""
    return replace(LeaseHolder("other", "node-9", "node-9/boot/pid", 1, 1, 0), **changes)  # type: ignore[arg-type]


def put(storage: Storage, holder: LeaseHolder) -> None:
    storage.write_json(KEY, asdict(holder))


def test_hold_and_give_back(storage: Storage):
    with hold(storage, KEY):
        document = storage.read_json(KEY)
        assert document["pid"] == os.getpid()
        assert document["machine"] == machine_id()
        assert document["start_time"] == start_time(os.getpid())
        assert document["beat"] == 0
    assert storage.list() == []


def test_given_back_after_an_error(memory: Storage):
    with pytest.raises(RuntimeError), hold(memory, KEY):
        raise RuntimeError
    assert memory.list() == []


def test_only_one_works_at_a_time(storage: Storage):
    working: list[int] = []
    overlaps: list[int] = []
    waited: list[LeaseHolder] = []

    def work(number: int) -> None:
        with hold(storage, KEY, poll=SOON, ttl=NEVER, on_wait=waited.append):
            working.append(number)
            overlaps.append(len(working))
            time.sleep(0.02)
            working.remove(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert overlaps == [1, 1, 1, 1]
    assert waited
    assert {holder.pid for holder in waited} == {os.getpid()}


def test_a_living_holder_is_waited_for(memory: Storage):
    put(memory, other())
    waited: list[LeaseHolder] = []
    entered = threading.Event()

    def wait() -> None:
        with hold(memory, KEY, poll=SOON, ttl=NEVER, on_wait=waited.append):
            entered.set()

    thread = threading.Thread(target=wait)
    thread.start()
    while not waited:
        time.sleep(SOON)
    assert not entered.wait(0.1)
    put(memory, other(beat=1))  # a beat is no other holder
    assert not entered.wait(0.05)
    memory.delete(KEY)
    thread.join()
    assert entered.is_set()
    assert waited == [other()]


def test_a_holder_that_stopped_beating_is_replaced(memory: Storage):
    put(memory, other())
    with hold(memory, KEY, poll=SOON, ttl=0.1):
        assert memory.read_json(KEY)["holder"] != "other"
    assert memory.list() == []


def test_a_holder_that_beats_is_not_replaced(memory: Storage):
    put(memory, other())
    entered = threading.Event()

    def wait() -> None:
        with hold(memory, KEY, poll=SOON, ttl=5.0):
            entered.set()

    thread = threading.Thread(target=wait)
    thread.start()
    for beat in range(20):
        put(memory, other(beat=beat))
        assert not entered.wait(0.01)
    memory.delete(KEY)
    thread.join()


def test_a_dead_process_of_this_machine_is_replaced_at_once(memory: Storage):
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    child.wait()
    put(memory, other(machine=machine_id(), pid=child.pid))
    with hold(memory, KEY, poll=SOON, ttl=NEVER):
        pass
    born = start_time(os.getpid())
    assert born is not None
    put(memory, other(machine=machine_id(), pid=os.getpid(), start_time=born - 1))  # our id, an earlier process
    with hold(memory, KEY, poll=SOON, ttl=NEVER):
        pass


def test_a_killed_holder_is_replaced(tmp_path: Path):
    storage = Storage.open(tmp_path)
    script = f"""
import time
from headrace.lease import hold
from headrace.storage import Storage
with hold(Storage.open({str(tmp_path)!r}), {KEY!r}):
    print("held", flush=True)
    time.sleep(60)
"""
    holder = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        holder.kill()
    assert storage.exists(KEY)
    with hold(storage, KEY, poll=SOON, ttl=NEVER):
        assert storage.read_json(KEY)["pid"] == os.getpid()


@pytest.mark.parametrize("data", [b"", b"{}", b"[1]", b'{"holder": 1}', b"\xff"])
def test_a_lease_that_says_nothing_runs_out(memory: Storage, data: bytes):
    memory.write_bytes(KEY, data)
    with hold(memory, KEY, poll=SOON, ttl=0.05):
        assert json.loads(memory.read_bytes(KEY))["pid"] == os.getpid()


def test_the_holder_beats(memory: Storage):
    with hold(memory, KEY, ttl=0.04):
        while memory.read_json(KEY)["beat"] < 2:
            time.sleep(SOON)
    assert memory.list() == []


def test_a_lease_that_was_taken_over_is_left_alone(memory: Storage, caplog: pytest.LogCaptureFixture):
    with hold(memory, KEY, ttl=0.04):
        put(memory, other())
        while "was taken over by another process" not in caplog.text:
            time.sleep(SOON)
    assert memory.read_json(KEY) == asdict(other())


def test_a_store_that_fails_later_does_not_fail_the_work(
    memory: Storage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def fail(*_: object) -> None:
        raise StorageUnavailable("The store is away.")

    with hold(memory, KEY, ttl=0.04):
        monkeypatch.setattr(memory, "read_bytes", fail)
        while "could not be renewed: The store is away." not in caplog.text:
            time.sleep(SOON)
    assert "could not be given back and will run out: The store is away." in caplog.text


def test_a_store_that_fails_at_once_is_told(memory: Storage, monkeypatch: pytest.MonkeyPatch):
    def fail(*_: object) -> None:
        raise StorageUnavailable("The store is away.")

    monkeypatch.setattr(memory, "create", fail)
    with pytest.raises(StorageUnavailable), hold(memory, KEY):
        pytest.fail("not held")


def test_a_free_lease_is_held_without_waiting(memory: Storage):
    with hold_if_free(memory, KEY) as free:
        assert free
        with hold_if_free(memory, KEY) as again:
            assert not again
        assert memory.read_json(KEY)["pid"] == os.getpid()
    assert memory.list() == []


def test_a_lease_of_the_dead_is_free_and_one_of_another_machine_is_not(memory: Storage):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    dead = other(machine=machine_id(), pid=ended.pid, start_time=start_time(ended.pid))
    ended.wait()
    put(memory, dead)
    with hold_if_free(memory, KEY) as free:
        assert free
    put(memory, other())
    with hold_if_free(memory, KEY) as free:
        assert not free
    assert memory.read_json(KEY)["holder"] == "other"
