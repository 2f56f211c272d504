"""The stage `evaluate`: the exported model is scored by the code that also runs in the training loop.

A result is keyed by what was measured and on which weights, so a changed evaluation is a new result and trains nothing.
"""

import time
from dataclasses import dataclass
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from headrace.commit import Commit, read_commit
from headrace.digest import digest_json, short
from headrace.errors import DamagedData, InputError, NotFound, Terminal
from headrace.registry import Registry
from headrace.terminal import StageProgress
from headrace.tracking import Point
from tasks.child import run_module
from tasks.console import terminal
from tasks.export import ExportResult
from tasks.policy import RETRY_DELAYS, SHORT_RETRIES, worth_another_try
from tasks.runs import DatasetRef, Run, Workspace
from tasks.shown import evaluation_in_training
from training.evaluation.spec import COMMIT_KIND, EvalSpec, EvaluationTask
from training.export.spec import COMMIT_KIND as EXPORT_KIND

MODEL_TAG = "headrace.model_id"
SPEC_TAG = "headrace.evaluation"
LOSS_TOLERANCE = 0.05
"""Nats per token: bfloat16 weights move the loss by less than a hundredth, another tensor by whole nats."""
SUMMARY = ("loss", "perplexity", "bits_per_byte", "tokens", "bytes")


@dataclass(frozen=True)
class Scored:
    """The committed score of one model."""

    summary: dict[str, Any]
    """loss, perplexity, bits_per_byte, tokens, bytes."""
    baselines: dict[str, Any]
    prefix: str
    """Storage key of the result's folder."""
    reused: bool

    @property
    def bits_per_byte(self) -> float:
        """Lower is better."""
        return float(self.summary["bits_per_byte"])


@dataclass(frozen=True)
class EvaluateResult:
    """The evaluation of a run's export."""

    spec: EvalSpec
    scored: Scored
    model: str
    """Storage key of the export."""

    @property
    def digest(self) -> str:
        """Two results compare only when this is equal."""
        return self.spec.digest

    @property
    def bits_per_byte(self) -> float:
        """Lower is better."""
        return self.scored.bits_per_byte


@task(
    name="evaluate",
    retries=SHORT_RETRIES,
    retry_delay_seconds=RETRY_DELAYS,
    retry_condition_fn=worth_another_try,
    cache_policy=NO_CACHE,
    persist_result=False,
)
def evaluate(space: Workspace, run: Run, exported: ExportResult) -> EvaluateResult:
    """Score the export, or find its score."""
    spec = evaluation_spec(run)
    with terminal().stage("evaluate", unit="windows") as stage:
        dataset = DatasetRef(run.spec.dataset_key, run.spec.dataset_digest, run.spec.tokenizer_digest)
        scored = score(space, run, spec, dataset, exported.prefix, owner=run.run_id, stage=stage)
        _require_the_trained_weights(space, run, exported, scored)
        _show(space, run, exported, spec, scored)
        what = "reused" if scored.reused else "measured"
        stage.conclude(f"{what}: {scored.bits_per_byte:.4f} bits per byte, loss {scored.summary['loss']:.4f}")
        return EvaluateResult(spec, scored, exported.prefix)


def _require_the_trained_weights(space: Workspace, run: Run, exported: ExportResult, scored: Scored) -> None:
    """Refuse an export that does not score what the same weights scored at the end of the training."""
    seen = evaluation_in_training(space.storage, run.spec.run_prefix, exported.step)
    summary = scored.summary
    if seen is None or seen["tokens"] != summary["tokens"]:  # another evaluation was asked for meanwhile
        return
    if abs(seen["loss"] - summary["loss"]) > LOSS_TOLERANCE:
        model, score_at = space.storage.url(exported.prefix), space.storage.url(scored.prefix)
        raise Terminal(
            f"The exported model at {model} has a validation loss of {summary['loss']:.4f}, "
            f"but the training ended at step {exported.step} with {seen['loss']:.4f} on the same tokens, so these are "
            f"not the trained weights; nothing is registered. Delete that folder and {score_at}, "
            "then give the same command again."
        )


def evaluation_spec(run: Run) -> EvalSpec:
    """What this command's config measures."""
    spec = run.spec
    return EvalSpec.of(
        spec.evaluation,
        dataset_digest=spec.dataset_digest,
        tokenizer_digest=spec.tokenizer_digest,
        window=spec.training.seq_len,
        precision=spec.training.precision,
    )


def score(
    space: Workspace,
    run: Run,
    spec: EvalSpec,
    dataset: DatasetRef,
    model: str,
    *,
    owner: str,
    stage: StageProgress | None = None,
) -> Scored:
    """The score of the model folder `model` by `spec` on `dataset`, measured when the run `owner` does not have it.

    `run` says how it is computed. Raises NotFound when there is no such model, and InputError when it reads other
    tokens than the dataset holds.
    """
    export = read_commit(space.storage, model, kind=EXPORT_KIND)
    if export is None:
        raise NotFound(f"There is no exported model at {space.storage.url(model)}.")
    if export.body["tokenizer_digest"] != spec.tokenizer_digest:
        place = space.storage.url(model)
        raise InputError(f"The model at {place} has another tokenizer than the dataset {dataset.key}.")
    digest = digest_json({"spec": spec.digest, "model": export.digest})
    target = f"runs/{owner}/artifacts/evaluations/{digest}"
    found = read_commit(space.storage, target, kind=COMMIT_KIND)
    if found is not None:
        return _scored(found, target, reused=True)
    task_document = EvaluationTask(
        storage_root=space.storage.root_url,
        model=model,
        dataset_key=dataset.key,
        spec=spec,
        target=target,
        work_dir=str(space.work_dir),
        batch_size=run.spec.evaluation.batch_size,
        device=run.spec.layout.device,
    )
    run_module(
        "training.evaluation.main",
        task_document.model_dump(mode="json"),
        folder=space.work_dir / run.run_id / f"evaluate-{short(digest)}",
        on_report=lambda report: _progress(stage, report),
    )
    found = read_commit(space.storage, target, kind=COMMIT_KIND)
    if found is None:
        raise DamagedData(f"The evaluation was made, but {space.storage.url(target)} has no commit.")
    return _scored(found, target, reused=False)


def _scored(commit: Commit, prefix: str, *, reused: bool) -> Scored:
    return Scored(dict(commit.body["summary"]), dict(commit.body["baselines"]), prefix, reused)


def _progress(stage: StageProgress | None, report: dict[str, Any]) -> None:
    if stage is not None and "progress" in report:
        stage.update(report["progress"], total=report["total"])


def _show(space: Workspace, run: Run, exported: ExportResult, spec: EvalSpec, scored: Scored) -> None:
    """Show the score on the logged model, under the digest of what was measured."""
    now = round(time.time() * 1000)
    points = [Point(name, float(scored.summary[name]), exported.step, now) for name in SUMMARY]
    Registry(space.tracker).log_model_points(
        run.run_id, exported.model.model_id, points, dataset_name=run.spec.dataset_key, digest=spec.digest
    )
