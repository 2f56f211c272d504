import json
import os
import time

from headrace.events import EventWriter
from training.sink import Sink


def test_a_heartbeat_says_who_where_and_when(tmp_path):
    path = tmp_path / "heartbeats" / "rank-3.json"
    sink = Sink(rank=3, heartbeat=path)
    before = time.time()
    sink.phase("data", step=7)
    sink.phase("optimizer")
    beat = json.loads(path.read_text())
    assert (beat["rank"], beat["pid"], beat["step"], beat["phase"]) == (3, os.getpid(), 7, "optimizer")
    assert before <= beat["time"] <= time.time()
    assert sink.step == 7


def test_no_half_written_heartbeat_is_ever_seen(tmp_path):
    path = tmp_path / "rank-0.json"
    sink = Sink(heartbeat=path)
    inodes = set()
    for step in range(5):
        sink.phase("data", step=step)
        inodes.add(path.stat().st_ino)
        assert json.loads(path.read_text())["step"] == step
    assert len(inodes) > 1  # each is another file, renamed into place


def test_events_go_to_the_log_of_the_rank_that_has_one(tmp_path):
    writer = EventWriter(tmp_path / "events.jsonl", 2)
    Sink(events=writer).event("step", step=1, loss=2.5)
    Sink().event("step", step=2, loss=2.0)
    (event,) = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert {name: event[name] for name in ("attempt", "kind", "step", "loss")} == {
        "attempt": 2,
        "kind": "step",
        "step": 1,
        "loss": 2.5,
    }
    writer.close()
