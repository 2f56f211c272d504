"""Samples of the machine: now and then, under the step that the ranks have reached, in MLflow's own names."""

from headrace.events import EventTail
from headrace.mirror import points_of
from training.launch.machine import FIRST_SECONDS, INTERVAL_SECONDS, MachineLog


def test_a_sample_is_taken_when_it_is_time(tmp_path):
    log = MachineLog(tmp_path / "machine.jsonl", attempt=3)
    tail = EventTail(tmp_path / "machine.jsonl")
    log.look(100.0, 0)
    log.look(100.0 + FIRST_SECONDS - 0.1, 4)
    assert tail.new() == []
    log.look(100.0 + FIRST_SECONDS, 5)
    log.look(99.9 + FIRST_SECONDS + INTERVAL_SECONDS, 6)
    (sample,) = tail.new()
    assert (sample["attempt"], sample["kind"], sample["step"]) == (3, "system", 5)
    assert 0 <= sample["cpu_utilization_percentage"] <= 100
    assert 0 < sample["system_memory_usage_percentage"] <= 100
    assert sample["system_memory_usage_megabytes"] > 0
    assert sample["network_receive_megabytes"] >= 0


def test_it_is_shown_in_the_tab_that_mlflow_has_for_it():
    event = {"time": 2.0, "attempt": 1, "kind": "system", "step": 5, "cpu_utilization_percentage": 12.5}
    assert [(p.key, p.value, p.step, p.timestamp_ms) for p in points_of(event)] == [
        ("system/cpu_utilization_percentage", 12.5, 5, 2000)
    ]
