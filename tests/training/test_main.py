"""One rank of an attempt, from its file to the result that it leaves; and what the stages make of it."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from headrace.commit import check_files
from headrace.storage import Storage
from tests.training.conftest import TextDataset
from tests.training.toy import run_spec
from training.checkpoint.catalog import list_commits
from training.evaluation.main import run_evaluation
from training.evaluation.spec import EvalSpec, EvaluationTask
from training.export.main import export
from training.export.spec import ExportSpec
from training.launch.resume import next_attempt
from training.main import is_echo, leave, run_rank
from training.parallel.world import World
from training.run_spec import AttemptSpec, RankResult, RunSpec

STEPS = 4


def run_of(dataset: TextDataset, run_id: str, **changes: Any) -> RunSpec:
    parts: dict[str, Any] = {
        "run_id": run_id * 32,
        "model": {"vocab_size": 300},
        "training": {"steps": STEPS, "precision": "float32"},
        "dataset_key": dataset.prepared.dataset_key,
        "dataset_digest": dataset.prepared.digest,
        "tokenizer_digest": dataset.prepared.tokenizer_digest,
        "checkpoint": {"save_every": 1},
        "evaluation": {"every": 2, "max_tokens": 600, "prompts": ("The quick",), "sample_tokens": 5},
        "launch": {"ranks_per_node": 2, "threads_per_rank": 1},
    }
    for name, value in changes.items():
        parts[name] = {**parts.get(name, {}), **value} if isinstance(value, dict) else value
    return run_spec(**parts)


def attempt_of(dataset: TextDataset, run: RunSpec, tmp_path: Path) -> AttemptSpec:
    storage = Storage.open(dataset.root)
    storage.write_json(f"{run.run_prefix}/run.json", run.model_dump(mode="json"))
    spec = next_attempt(storage, run, work_root=tmp_path)
    assert spec is not None
    return spec


class StopAfter(threading.Event):
    """Asks to stop before the step after `step`; it is looked at once a step."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self._left = step

    def is_set(self) -> bool:
        self._left -= 1
        return self._left < 0


def rank_of_attempt(world: World, spec: AttemptSpec, port: int, stop_after: int = STEPS) -> RankResult:
    """What `main` does, without leaving the process; the group of the fixture makes room for the attempt's own."""
    dist.destroy_process_group()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ["HEADRACE_HOME"] = str(spec.work_path / "home")
    return run_rank(spec, world.rank, StopAfter(stop_after) if world.rank == 0 else threading.Event())


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def events_of(spec: AttemptSpec) -> list[dict[str, Any]]:
    return [json.loads(line) for line in spec.events_path.read_text(encoding="utf-8").splitlines()]


def test_two_ranks_train_commit_and_leave_results_and_the_stage_scores_the_same(run_ranks, text_dataset, tmp_path):
    run = run_of(text_dataset, "1")
    spec = attempt_of(text_dataset, run, tmp_path)
    results = run_ranks(2, rank_of_attempt, spec, free_port())
    assert [(r.rank, r.outcome, r.step, r.exit_code) for r in results] == [(0, "finished", 4, 0), (1, "finished", 4, 0)]

    storage = Storage.open(text_dataset.root)
    newest = list_commits(storage, run.run_prefix)[0]
    assert newest.step == STEPS
    check_files(storage, newest.prefix, newest.commit, content=True)
    events = events_of(spec)
    assert [event["step"] for event in events if event["kind"] == "step"] == [1, 2, 3, 4]
    assert events[0]["kind"] == "attempt.started"
    assert events[0]["world_size"] == 2
    assert events[-1]["kind"] == "finished"
    scored = {event["step"]: event for event in events if event["kind"] == "evaluation"}
    assert list(scored) == [0, 2, 4]
    for rank in (0, 1):
        beat = json.loads(spec.heartbeat_path(rank).read_text(encoding="utf-8"))
        assert (beat["rank"], beat["step"], beat["phase"]) == (rank, 4, "finished")

    exported = ExportSpec(
        storage_root=str(text_dataset.root), run_id=run.run_id, checkpoint=newest.restore_point, target="models/one"
    )
    export(exported)
    eval_spec = EvalSpec.of(
        run.evaluation,
        dataset_digest=run.dataset_digest,
        tokenizer_digest=run.tokenizer_digest,
        window=run.training.seq_len,
        precision="float32",
    )
    task = EvaluationTask(
        storage_root=str(text_dataset.root),
        model="models/one",
        dataset_key=run.dataset_key,
        spec=eval_spec,
        target=f"{run.run_prefix}/evaluations/{eval_spec.digest}",
        work_dir=str(tmp_path / "stage"),
        batch_size=5,
        device="cpu",
    )
    commit = run_evaluation(task)
    for name in ("loss", "bits_per_byte", "tokens"):
        assert commit.body["summary"][name] == pytest.approx(scored[4][name], rel=1e-6)
    assert commit.body["summary"]["loss"] < scored[0]["loss"] - 0.1
    assert run_evaluation(task) == commit


def test_a_stopped_attempt_is_continued_by_the_next_to_the_same_weights(run_ranks, text_dataset, tmp_path):
    straight = attempt_of(text_dataset, run_of(text_dataset, "2"), tmp_path)
    run_ranks(2, rank_of_attempt, straight, free_port())

    run = run_of(text_dataset, "3")
    first = attempt_of(text_dataset, run, tmp_path)
    stopped = run_ranks(2, rank_of_attempt, first, free_port(), 2)
    assert [(r.outcome, r.step, r.exit_code) for r in stopped] == [("stopped", 2, 3)] * 2
    assert events_of(first)[-1]["kind"] == "stopped"

    second = attempt_of(text_dataset, run, tmp_path)
    assert second.restore is not None
    assert second.restore.step == 2
    finished = run_ranks(2, rank_of_attempt, second, free_port())
    assert [r.outcome for r in finished] == ["finished", "finished"]
    told = [event for event in events_of(second) if event["kind"] == "step"]
    assert [event["step"] for event in told] == [3, 4]
    assert data_of(text_dataset, run.run_prefix) == data_of(text_dataset, straight.run.run_prefix)


def data_of(dataset: TextDataset, run_prefix: str) -> dict[str, str]:
    """Digests of the last checkpoint's files."""
    newest = list_commits(Storage.open(dataset.root), run_prefix)[0]
    assert newest.step == STEPS
    return {name: entry.sha256 for name, entry in newest.commit.files.items()}


@pytest.mark.parametrize(
    ("changes", "kind", "exit_code", "message"),
    [
        ({"dataset_digest": "f" * 64}, "DamagedData", 1, "but the run was made for ffff"),
        ({"model": {"vocab_size": 299}}, "ConfigError", 2, "300 tokens, but model.vocab_size is 299; set it to 300"),
        ({"training": {"seq_len": 100_000}}, "InputError", 2, "fewer than one sequence of training.seq_len 100000"),
        ({"layout": {"dp_shard": 2}}, "ConfigError", 2, r"layout.dp_shard is 2, but 1 ranks were started"),
        ({"dataset_key": "toy-0"}, "NotFound", 1, "toy-0"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_run_fails_with_one_sentence(run_ranks, text_dataset, tmp_path, changes, kind, exit_code, message):
    spec = attempt_of(text_dataset, run_of(text_dataset, "4", **changes), tmp_path)
    (result,) = run_ranks(1, rank_of_attempt, spec, free_port())
    assert (result.outcome, result.error_kind, result.exit_code, result.step) == ("failed", kind, exit_code, 0)
    assert message in result.message
    assert result.retryable is False
    assert not result.secondary


def test_an_attempt_file_comes_back_as_it_was_written(text_dataset, tmp_path):
    from training.run_spec import read_attempt

    spec = attempt_of(text_dataset, run_of(text_dataset, "5"), tmp_path)
    assert read_attempt(spec.write()) == spec


def test_the_echo_of_a_lost_peer_is_told_from_a_cause():
    assert is_echo(RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4321"))
    assert is_echo(RuntimeError("... Connection reset by peer"))
    assert not is_echo(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_echo(ValueError("Connection closed by peer"))


def test_a_signal_stops_a_rank_that_saves_and_says_so(text_dataset, tmp_path):
    """The program itself, as the one rank of a run that would be long."""
    run = run_of(
        text_dataset, "7", training={"steps": 100_000}, checkpoint={"save_every": 10}, launch={"ranks_per_node": 1}
    )
    spec = attempt_of(text_dataset, run, tmp_path)
    environment = {**os.environ, "HEADRACE_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen([sys.executable, "-m", "training.main", str(spec.write())], env=environment) as process:
        while process.poll() is None and step_of(spec) < 3:
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 3
    result = RankResult.model_validate_json(spec.result_path(0).read_bytes())
    assert result.outcome == "stopped"
    (newest, *_) = list_commits(Storage.open(text_dataset.root), run.run_prefix)
    assert newest.step == result.step >= 3


def step_of(spec: AttemptSpec) -> int:
    path = spec.heartbeat_path(0)
    return int(json.loads(path.read_text(encoding="utf-8"))["step"]) if path.exists() else 0


def leave_with(world: World, spec: AttemptSpec) -> None:
    leave(spec, RankResult(rank=world.rank, outcome="stopped", step=3, exit_code=3, time=1.0))


def test_a_rank_leaves_its_result_and_the_process(run_ranks, text_dataset, tmp_path):
    spec = attempt_of(text_dataset, run_of(text_dataset, "6"), tmp_path)
    with pytest.raises(AssertionError, match="rank 0 of 1 left with 3"):
        run_ranks(1, leave_with, spec)
    result = RankResult.model_validate_json(spec.result_path(0).read_bytes())
    assert (result.outcome, result.step, result.exit_code) == ("stopped", 3, 3)
