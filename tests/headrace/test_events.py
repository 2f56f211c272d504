"""Events survive crashes of the writer and of the publication: none is lost, none counts twice."""

import json
import resource
import secrets
import signal
import tempfile
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import DamagedData, StorageFull, StorageUnavailable
from headrace.events import EventTail, EventWriter, read_events
from headrace.storage import Storage

RUN = "runs/1/artifacts"


@pytest.fixture
def memory() -> Storage:
    return Storage.open(f"memory://{secrets.token_hex(8)}")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "attempt-0003" / "events.jsonl"


def steps(events: list[dict[str, Any]]) -> list[int]:
    return [event["step"] for event in events]


def test_append(path: Path):
    with EventWriter(path, attempt=3) as writer:
        first = writer.append("attempt.started", host="node-1")
        second = writer.append("step", step=1, loss=2.31, name="ä\n")
    assert (first["seq"], second["seq"]) == (1, 2)
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert lines == [first, second]
    assert {**second, "time": 0} == {
        "seq": 2, "time": 0, "attempt": 3, "kind": "step", "step": 1, "loss": 2.31, "name": "ä\n"
    }  # fmt: skip
    assert 1.7e9 < first["time"] <= second["time"]


def test_reserved_fields(path: Path):
    with EventWriter(path, 1) as writer:
        for name in ("seq", "time", "attempt", "kind"):
            with pytest.raises(ValueError, match=f"one is '{name}'"):
                writer.append("step", **{name: 1})
        with pytest.raises(TypeError):
            writer.append("step", value=object())
        assert writer.append("step")["seq"] == 1  # a refused event takes no number
    assert len(path.read_text().splitlines()) == 1


def test_numbers_that_json_does_not_have(path: Path):
    with EventWriter(path, 1) as writer:
        writer.append("step", loss=float("nan"), more=[float("inf"), {"x": -float("inf")}])
    (event,) = EventTail(path).new()
    assert event["loss"] == "nan"
    assert event["more"] == ["inf", {"x": "-inf"}]
    assert float(event["more"][1]["x"]) == -float("inf")


def test_numbers_of_arrays(path: Path):
    with EventWriter(path, 1) as writer:
        writer.append("step", loss=np.float32(0.5), step=np.int64(3), norm=np.float64("nan"), flag=np.bool_(True))
    (event,) = EventTail(path).new()
    assert (event["loss"], event["step"], event["norm"], event["flag"]) == (0.5, 3, "nan", True)


def test_a_full_disk_leaves_whole_lines(memory: Storage, path: Path, monkeypatch: pytest.MonkeyPatch):
    with EventWriter(path, 1) as writer:
        writer.append("step", step=1)
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 20, limits[1]))
        try:
            with pytest.raises(StorageFull, match=f"Cannot append to {path} .*free some space"):
                writer.append("step", step=2)  # twenty bytes of it fit
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            signal.signal(signal.SIGXFSZ, handler)
        assert steps(EventTail(path).new()) == [1]
        assert writer.append("step", step=3)["seq"] == 2
        writer.publish(memory, RUN)
    assert steps(EventTail(path).new()) == steps(read_events(memory, RUN, 1)) == [1, 3]


def test_tail(path: Path):
    tail = EventTail(path)
    assert tail.new() == []
    with EventWriter(path, 1) as writer:
        assert tail.new() == []
        writer.append("step", step=1)
        writer.append("step", step=2)
        assert steps(tail.new()) == [1, 2]
        assert tail.new() == []
        with path.open("ab") as file:
            file.write(b'{"seq": 3, "st')
            file.flush()
            assert tail.new() == []
            file.write(b'ep": 3}\n{"seq"')
            file.flush()
        assert steps(tail.new()) == [3]
    with path.open("ab") as file:
        file.write(b" nonsense\n")
    with pytest.raises(DamagedData, match="holds a line that is no event"):
        tail.new()


def test_publish(storage: Storage, path: Path):
    assert read_events(storage, RUN, 3) == []
    with EventWriter(path, 3) as writer:
        writer.publish(storage, RUN)
        assert storage.list() == []
        writer.append("step", step=1)
        writer.append("step", step=2)
        writer.publish(storage, RUN)
        writer.publish(storage, RUN)
        assert storage.list() == [f"{RUN}/events/0003-000000.jsonl"]
        writer.append("step", step=3)
        assert steps(read_events(storage, RUN, 3)) == [1, 2]
        writer.publish(storage, RUN)
    assert storage.children(f"{RUN}/events") == ["0003-000000.jsonl", "0003-000001.jsonl"]
    assert read_events(storage, RUN, 3) == EventTail(path).new()
    assert read_events(storage, RUN, 30) == read_events(storage, RUN, 4) == []


def test_another_process_publishes_the_rest(memory: Storage, path: Path):
    with EventWriter(path, 3) as killed:
        for step in range(5):
            killed.append("step", step=step)
            if step in (0, 2):
                killed.publish(memory, RUN)
        with path.open("ab") as file:
            file.write(b'{"seq": 6, "torn')
    with EventWriter(path, 3) as heir:
        heir.publish(memory, RUN)
        heir.publish(memory, RUN)
        assert heir.append("attempt.ended", step=5)["seq"] == 6
        heir.publish(memory, RUN)
    assert steps(read_events(memory, RUN, 3)) == [0, 1, 2, 3, 4, 5]
    assert [len(memory.read_bytes(key).splitlines()) for key in memory.list()] == [1, 2, 2, 1]
    assert steps(EventTail(path).new()) == [0, 1, 2, 3, 4, 5]


def test_two_publishers_of_one_file(memory: Storage, path: Path):
    with EventWriter(path, 1) as writer:
        writer.append("step", step=1)
        writer.publish(memory, RUN)
        writer.append("step", step=2)
        with EventWriter(path, 1) as other:
            writer.append("step", step=3)
            other.publish(memory, RUN)  # 2 becomes a segment of its own
            writer.publish(memory, RUN)  # 2 and 3 were meant to become the same segment
    assert [len(memory.read_bytes(key).splitlines()) for key in memory.list()] == [1, 1, 1]
    assert steps(read_events(memory, RUN, 1)) == [1, 2, 3]


def test_a_segment_that_is_damaged(memory: Storage, path: Path):
    for data in (b"{}\n", b"[1]\n", b"x\n", b'{"seq": "1"}\n', b"\xff\n"):
        memory.write_bytes(f"{RUN}/events/0003-000000.jsonl", data)
        with pytest.raises(DamagedData, match=r"events/0003-000000.jsonl holds a line that is no event"):
            read_events(memory, RUN, 3)


def test_threads(memory: Storage, path: Path):
    with EventWriter(path, 1) as writer:

        def work(number: int) -> None:
            for step in range(50):
                writer.append("step", step=1000 * number + step)
                if step % 10 == 0:
                    writer.publish(memory, RUN)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        writer.publish(memory, RUN)
    events = read_events(memory, RUN, 1)
    assert [event["seq"] for event in events] == list(range(1, 201))
    assert sorted(steps(events)) == sorted(1000 * number + step for number in range(4) for step in range(50))
    assert events == EventTail(path).new()


class Unreliable:
    """A storage whose next create-only write fails before or after it happened."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self.fail: str | None = None

    def create(self, key: str, data: bytes) -> bool:
        fail, self.fail = self.fail, None
        if fail == "before":
            raise StorageUnavailable("lost request")
        created = self._storage.create(key, data)
        if fail == "after":
            raise StorageUnavailable("lost answer")
        return created

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from(["append", "publish", "lost request", "lost answer", "killed", "torn"]), max_size=25))
def test_any_order_of_crashes(actions: list[str]):
    storage = Unreliable(Storage.open(f"memory://{secrets.token_hex(8)}"))
    appended = 0
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "events.jsonl"
        writer = EventWriter(path, 7)
        for action in actions:
            if action == "append":
                appended += 1
                writer.append("step", step=appended)
            elif action in ("publish", "lost request", "lost answer"):
                storage.fail = {"lost request": "before", "lost answer": "after"}.get(action)
                try:
                    writer.publish(storage, RUN)  # type: ignore[arg-type]
                except StorageUnavailable:
                    continue
                storage.fail = None
                assert steps(read_events(storage, RUN, 7)) == list(range(1, appended + 1))  # type: ignore[arg-type]
            else:
                writer.close()
                if action == "torn":
                    with path.open("ab") as file:
                        file.write(b'{"seq": 999, "step": 9')
                writer = EventWriter(path, 7)
        writer.publish(storage, RUN)  # type: ignore[arg-type]
        writer.close()
        assert steps(EventTail(path).new()) == list(range(1, appended + 1))
    assert steps(read_events(storage, RUN, 7)) == list(range(1, appended + 1))  # type: ignore[arg-type]
