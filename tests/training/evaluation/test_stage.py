"""The stage as a program: what it reads, writes, says, and refuses."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.commit import check_files, read_commit
from headrace.errors import CommitConflict, ConfigError, InputError, NotFound
from headrace.storage import Storage
from tests.training.conftest import TextDataset
from tests.training.test_main import STEPS, attempt_of, free_port, rank_of_attempt, run_of
from training.checkpoint.catalog import newest_at
from training.evaluation.main import run_evaluation
from training.evaluation.spec import COMMIT_KIND, EvalSpec, EvaluationTask
from training.export.main import export
from training.export.spec import ExportSpec


@pytest.fixture(scope="module")
def models(_warm_ranks, text_dataset: TextDataset, tmp_path_factory) -> None:
    """Two exports of one run on the store: after its first step, and after its last."""
    run = run_of(text_dataset, "8", launch={"ranks_per_node": 1})
    _warm_ranks.run(1, rank_of_attempt, attempt_of(text_dataset, run, tmp_path_factory.mktemp("run")), free_port())
    storage = Storage.open(text_dataset.root)
    for name, step in (("early", 1), ("late", STEPS)):
        restore = newest_at(storage, run.run_prefix, step).restore_point
        export(
            ExportSpec(
                storage_root=str(text_dataset.root), run_id=run.run_id, checkpoint=restore, target=f"models/{name}"
            )
        )


def task(dataset: TextDataset, tmp_path: Path, **changes: Any) -> EvaluationTask:
    run = run_of(dataset, "8")
    spec = EvalSpec.of(
        run.evaluation,
        dataset_digest=run.dataset_digest,
        tokenizer_digest=run.tokenizer_digest,
        window=16,
        precision="float32",
    )
    return EvaluationTask(
        **{
            "storage_root": str(dataset.root),
            "model": "models/late",
            "dataset_key": run.dataset_key,
            "spec": spec,
            "target": f"evaluations/{tmp_path.name}",
            "work_dir": str(tmp_path / "work"),
            "device": "cpu",
            **changes,
        }
    )


def test_everything_is_written_and_committed(models, text_dataset, tmp_path):
    asked = task(text_dataset, tmp_path)
    commit = run_evaluation(asked)
    storage = Storage.open(text_dataset.root)
    check_files(storage, asked.target, commit, content=True)
    assert sorted(commit.files) == ["documents.jsonl", "result.json", "samples.json"]
    result = storage.read_json(f"{asked.target}/result.json")
    assert result["tokens"] == 599  # of 600 that the config allows
    assert len(result["nats_by_position"]) == 16
    assert commit.body["summary"]["loss"] == result["loss"]
    assert commit.body["spec_digest"] == asked.spec.digest
    lines = storage.read_bytes(f"{asked.target}/documents.jsonl").decode().splitlines()
    documents = [json.loads(line) for line in lines]
    assert sum(document["tokens"] for document in documents) == 599
    assert sum(document["bytes"] for document in documents) == result["bytes"]
    assert sum(document["nats"] for document in documents) == pytest.approx(result["nats"])
    (sample,) = storage.read_json(f"{asked.target}/samples.json")
    assert sample["prompt"] == "The quick"
    assert sample["text"]
    baselines = commit.body["baselines"]
    assert 0 < baselines["bigram_bits_per_byte"] < baselines["unigram_bits_per_byte"]


def test_again_finds_it_done_and_another_model_is_refused(models, text_dataset, tmp_path, monkeypatch):
    first = run_evaluation(task(text_dataset, tmp_path))
    with pytest.raises(CommitConflict, match="already holds the evaluation of another model"):
        run_evaluation(task(text_dataset, tmp_path, model="models/early"))
    monkeypatch.setattr("training.evaluation.main.evaluate", None)  # nothing is computed again
    assert run_evaluation(task(text_dataset, tmp_path, batch_size=3)) == first


def test_who_loses_a_race_takes_the_result_of_who_won(models, text_dataset, tmp_path, monkeypatch):
    """The winner's machine may have rounded otherwise: one result is as good."""
    asked = task(text_dataset, tmp_path)
    module = "training.evaluation.main"
    winner = run_evaluation(task(text_dataset, tmp_path, batch_size=7))
    answers = iter([None])
    real = read_commit
    monkeypatch.setattr(
        f"{module}.read_commit",
        lambda storage, prefix, *, kind: (
            next(answers, real(storage, prefix, kind=kind)) if kind == COMMIT_KIND else real(storage, prefix, kind=kind)
        ),
    )
    monkeypatch.setattr(f"{module}.samples", lambda *_: [{"prompt": "another", "text": "result"}])
    assert run_evaluation(asked) == winner


@pytest.fixture
def memory_store(text_dataset: TextDataset) -> Iterator[str]:
    """A copy of the store that has no local paths."""
    copy = Storage.open("memory://evaluated")
    origin = Storage.open(text_dataset.root)
    for prefix in ("models", "units", "datasets", "tokenizers"):
        for key in origin.list(prefix):
            copy.write_bytes(key, origin.read_bytes(key))
    yield "memory://evaluated"
    for prefix in copy.children():
        copy.delete_prefix(prefix)


def test_a_model_on_an_object_store_is_copied_and_scores_the_same(models, text_dataset, memory_store, tmp_path):
    local = run_evaluation(task(text_dataset, tmp_path))
    remote = run_evaluation(task(text_dataset, tmp_path, storage_root=memory_store))
    assert remote.body == local.body
    assert remote.files == local.files
    assert len(list((tmp_path / "work" / "models").rglob("model.safetensors"))) == 1


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"model": "models/none"}, NotFound, "There is no exported model at"),
        ({"dataset_key": "toy-0"}, NotFound, "toy-0"),
        ({"window": 17}, ConfigError, "A window of 17 tokens does not fit into a model of max_seq_len 16"),
        ({"dataset_digest": "f" * 64}, InputError, "The evaluation is defined on the dataset ffff"),
        ({"tokenizer_digest": "f" * 64}, InputError, "has the digest"),
    ],
)
def test_what_does_not_fit_is_refused(models, text_dataset, tmp_path, changes, error, message):
    asked = task(text_dataset, tmp_path)
    of_spec = {name: value for name, value in changes.items() if name in EvalSpec.model_fields}
    of_task = {name: value for name, value in changes.items() if name not in of_spec}
    asked = asked.model_copy(update={**of_task, "spec": asked.spec.model_copy(update=of_spec)})
    with pytest.raises(error, match=message):
        run_evaluation(asked)
    assert not Storage.open(text_dataset.root).list(asked.target)


def run_program(path: Path, tmp_path: Path) -> tuple[int, list[dict[str, Any]]]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "training.evaluation.main", str(path)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()]


def test_the_program_says_its_progress_and_its_result(models, text_dataset, tmp_path):
    asked = task(text_dataset, tmp_path)
    (tmp_path / "task.json").write_text(asked.model_dump_json())
    code, said = run_program(tmp_path / "task.json", tmp_path)
    assert code == 0
    assert {"progress": 38, "total": 38} in said
    commit = read_commit(Storage.open(text_dataset.root), asked.target, kind=COMMIT_KIND)
    assert commit is not None
    assert said[-1] == {"target": asked.target, "digest": commit.digest, **commit.body}


def test_the_program_says_what_is_wrong_on_one_line(tmp_path):
    (tmp_path / "task.json").write_text("{}")
    code, said = run_program(tmp_path / "task.json", tmp_path)
    assert code == 2
    assert "is not the spec of an evaluation" in said[-1]["error"]
    assert said[-1]["retryable"] is False
