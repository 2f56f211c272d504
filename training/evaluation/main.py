"""The evaluation stage: an exported model is scored, compared with the baselines, and asked for samples.

    python -m training.evaluation.main task.json

Standard output carries JSON lines: `progress` and `total` (windows) on the way, and as the last line the result, or
`error` and `retryable`. Written below the target: `result.json`, `documents.jsonl`, `samples.json`, then `COMMIT.json`.
Running it again for the same model and spec finds the result done, and changes nothing.
"""

import dataclasses
import logging
import os
import time
from pathlib import Path
from typing import Any

import torch

from data_prep.dataset import Dataset, open_dataset
from headrace.commit import Commit, FileEntry, read_commit, write_commit
from headrace.digest import canonical_json
from headrace.errors import CommitConflict, ConfigError, DamagedData, InputError, NotFound
from headrace.faults import fault_point
from headrace.storage import Storage, json_document
from training.evaluation.baselines import baselines
from training.evaluation.evaluate import EvalResult, evaluate
from training.evaluation.spec import COMMIT_KIND, EvaluationTask
from training.export.spec import COMMIT_KIND as EXPORT_KIND
from training.generate import TextModel, open_model
from training.program import run_program, say

logger = logging.getLogger(__name__)

PROGRESS_SECONDS = 1.0


def run_evaluation(task: EvaluationTask) -> Commit:
    """Score the model and commit the result; returns the commit, also when it was there before.

    Raises InputError when the model or the dataset is not the one that the spec is about, CommitConflict when the
    target holds the evaluation of another model.
    """
    storage = Storage.open(task.storage_root)
    export = read_commit(storage, task.model, kind=EXPORT_KIND)
    if export is None:
        raise NotFound(f"There is no exported model at {storage.url(task.model)}.")
    subject = {
        "spec": task.spec.model_dump(mode="json"),
        "spec_digest": task.spec.digest,
        "model_digest": export.digest,
    }
    existing = read_commit(storage, task.target, kind=COMMIT_KIND)
    if existing is not None:
        return _same(storage, task, existing, subject)
    fault_point("evaluate.begun")
    dataset = open_dataset(storage, task.dataset_key)
    _require_subject(task, dataset)
    folder = local_model(storage, task.model, export, Path(task.work_dir))
    model = open_model(folder, device=task.device, precision=task.spec.precision)
    if task.spec.window > model.config.max_seq_len:
        raise ConfigError(
            f"A window of {task.spec.window} tokens does not fit into a model of max_seq_len "
            f"{model.config.max_seq_len}; lower training.seq_len."
        )
    cache = Path(task.work_dir) / "cache"
    validation = dataset.stream(task.spec.split, cache)
    token_bytes = dataset.token_bytes()
    result = evaluate(
        model.engine.infer,
        validation,
        task.spec,
        token_bytes,
        world=model.engine.world,
        batch_size=task.batch_size,
        on_progress=_Progress().tell,
    )
    compared = baselines(dataset.stream("train", cache), validation, token_bytes, max_tokens=task.spec.max_tokens)
    documents = {
        "result.json": json_document({**result.summary(), "baselines": dataclasses.asdict(compared)}),
        "documents.jsonl": b"".join(canonical_json(record) + b"\n" for record in result.documents),
        "samples.json": json_document(samples(model, task)),
    }
    for name, data in documents.items():
        storage.write_bytes(f"{task.target}/{name}", data)
    body = {**subject, "summary": headline(result), "baselines": dataclasses.asdict(compared)}
    files = {name: FileEntry.of_bytes(data) for name, data in documents.items()}
    try:
        return write_commit(storage, task.target, kind=COMMIT_KIND, body=body, files=files)
    except CommitConflict:
        # Somebody else was faster; on another machine the last digits may differ, and one result is as good.
        committed = read_commit(storage, task.target, kind=COMMIT_KIND)
        assert committed is not None
        return _same(storage, task, committed, subject)


def _same(storage: Storage, task: EvaluationTask, existing: Commit, subject: dict[str, Any]) -> Commit:
    if any(existing.body.get(name) != value for name, value in subject.items()):
        raise CommitConflict(f"{storage.url(task.target)} already holds the evaluation of another model.")
    return existing


def _require_subject(task: EvaluationTask, dataset: Dataset) -> None:
    if dataset.digest != task.spec.dataset_digest or dataset.tokenizer_digest != task.spec.tokenizer_digest:
        raise InputError(
            f"The evaluation is defined on the dataset {task.spec.dataset_digest}, but {task.dataset_key} has the "
            f"digest {dataset.digest}."
        )


def local_model(storage: Storage, prefix: str, export: Commit, work_dir: Path) -> Path:
    """The exported folder on this machine: where the store has it, or a copy below `work_dir`."""
    where_it_lies = storage.local_path(prefix)
    if where_it_lies is not None:
        return where_it_lies
    folder = work_dir / "models" / export.digest
    for name in (*export.files, "COMMIT.json"):
        path = folder / name
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                storage.get_file(f"{prefix}/{name}", path)
            except NotFound as error:
                raise DamagedData(f"{storage.url(prefix)}/{name} is missing, though the export lists it.") from error
    return folder


def samples(model: TextModel, task: EvaluationTask) -> list[dict[str, str]]:
    """A greedy continuation of each prompt of the spec."""
    return [
        {"prompt": prompt, "text": model.complete(prompt, max_new_tokens=task.spec.sample_tokens)}
        for prompt in task.spec.prompts
    ]


def headline(result: EvalResult) -> dict[str, Any]:
    """The numbers that people compare."""
    names = ("loss", "perplexity", "bits_per_byte", "tokens", "bytes")
    return {name: getattr(result, name) for name in names}


class _Progress:
    """At most one line a second, and the last one."""

    def __init__(self) -> None:
        self._told = 0.0

    def tell(self, done: int, total: int) -> None:
        now = time.monotonic()
        if done >= total or now - self._told >= PROGRESS_SECONDS:
            self._told = now
            say({"progress": done, "total": total})


def describe(task: EvaluationTask) -> dict[str, Any]:
    """Make the evaluation and say what came out."""
    torch.set_num_threads(task.threads or len(os.sched_getaffinity(0)))
    commit = run_evaluation(task)
    return {"target": task.target, "digest": commit.digest, **commit.body}


def main() -> None:
    """Entry point."""
    run_program(EvaluationTask, "an evaluation", describe)


if __name__ == "__main__":
    main()
