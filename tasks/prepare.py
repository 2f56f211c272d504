"""The stage `prepare`: from text to a committed dataset. What is committed is found again and kept."""

import time

from prefect import task
from prefect.cache_policies import NO_CACHE

from data_prep.config import DataConfig, TokenizerConfig
from data_prep.dataset import PrepareProgress, PrepareResult
from data_prep.dataset import prepare as prepare_dataset
from headrace.terminal import StageProgress
from tasks.console import terminal
from tasks.policy import RETRY_DELAYS, SHORT_RETRIES, worth_another_try
from tasks.runs import Workspace

STEPS = {"hash": "reading", "tokenizer": "training a tokenizer", "units": "tokenising", "done": "writing the manifest"}


@task(
    name="prepare",
    retries=SHORT_RETRIES,
    retry_delay_seconds=RETRY_DELAYS,
    retry_condition_fn=worth_another_try,
    cache_policy=NO_CACHE,
    persist_result=False,
)
def prepare(space: Workspace, data: DataConfig, tokenizer: TokenizerConfig) -> PrepareResult:
    """Prepare the dataset, or find it."""
    with terminal().stage("prepare", unit="units") as stage:
        show = _Progress(stage)
        result = prepare_dataset(space.storage, data, tokenizer, work_dir=space.work_dir / "prepare", progress=show)
        stage.conclude(summary(result))
    return result


def summary(result: PrepareResult) -> str:
    """The dataset in one line."""
    counts = result.counts
    units = f"{result.units_built} units built, {result.units_reused} reused"
    parts = [f"{counts.documents:,} documents", f"{counts.tokens:,} tokens", units]
    if counts.skipped:
        parts.append(f"skipped {sum(counts.skipped.values()):,} ({_reasons(counts.skipped)})")
    return ", ".join(parts)


def _reasons(skipped: dict[str, int]) -> str:
    return ", ".join(f"{reason} {number:,}" for reason, number in skipped.items())


class _Progress:
    """Turns what `prepare` reports into one line."""

    def __init__(self, stage: StageProgress) -> None:
        self._stage = stage
        self._told: set[str] = set()
        self._tokenising_since: float | None = None

    def __call__(self, progress: PrepareProgress) -> None:
        if progress.note and progress.note not in self._told:
            self._told.add(progress.note)
            self._stage.note(progress.note)
        doing = STEPS.get(progress.stage, progress.stage)
        if progress.stage != "units" or not progress.units_total:
            self._stage.update(doing=doing)
            return
        self._tokenising_since = self._tokenising_since or time.monotonic()
        seconds = time.monotonic() - self._tokenising_since
        read = 100 * progress.text_bytes // progress.bytes_total if progress.bytes_total else 0
        self._stage.update(
            progress.units_done,
            total=progress.units_total,
            documents=progress.documents,
            tokens=progress.tokens,
            tokens_per_second=progress.tokens / seconds if seconds > 0 else 0.0,
            read=f"{min(read, 100)}%",
            doing=doing,
        )
