"""The stage `register`: a version that refers to the export, and the alias `champion` on the best one.

A version is found again by its export key. The alias moves only to a model with fewer bits per byte on the same
text; a champion that was scored on another one is first scored on this one.
"""

from collections.abc import Callable
from dataclasses import dataclass

from prefect import task
from prefect.cache_policies import NO_CACHE

from data_prep.config import DataConfig
from headrace.errors import DamagedData, InputError, NotFound
from headrace.faults import fault_point
from headrace.lease import hold
from headrace.registry import Registry, VersionRecord
from tasks.compare import Comparison, compare
from tasks.console import terminal
from tasks.evaluate import MODEL_TAG, SPEC_TAG, EvaluateResult
from tasks.export import EXPORT_TAG, ExportResult
from tasks.policy import RETRY_DELAYS, SHORT_RETRIES, worth_another_try
from tasks.runs import SCORE_TAG, VERSION_TAG, Run, Workspace

CHAMPION = "champion"


@dataclass(frozen=True)
class RegisterResult:
    """The version of a run's export, and what became of the champion."""

    name: str
    version: str
    new_version: bool
    champion: bool
    verdict: str

    @property
    def reused(self) -> bool:
        """Whether the version was there already."""
        return not self.new_version


@task(
    name="register",
    retries=SHORT_RETRIES,
    retry_delay_seconds=RETRY_DELAYS,
    retry_condition_fn=worth_another_try,
    cache_policy=NO_CACHE,
    persist_result=False,
)
def register(
    space: Workspace, run: Run, exported: ExportResult, evaluated: EvaluateResult, name: str, data: DataConfig
) -> RegisterResult:
    """Register the export, or find its version; then decide about the alias.

    `data` says where the text lies, for a champion that reads it with another tokenizer.
    """
    registry = Registry(space.tracker)
    with terminal().stage("register") as stage, hold(space.storage, f"leases/register-{name}"):
        version = registry.find_version(name, {EXPORT_TAG: exported.key})
        is_new = version is None
        if version is None:
            fault_point("version.before")
            version = registry.create_version(
                name, exported.model, run_id=run.run_id, tags=_lineage(run, exported, evaluated)
            )
            fault_point("version.after")
        elif version.tags.get(SPEC_TAG) != evaluated.digest:
            registry.set_version_tags(name, version.version, _score_tags(evaluated))
        champion, verdict = _decide(
            registry, version, lambda holder: compare(space, run, data, evaluated, holder, stage)
        )
        space.tracker.set_tags(
            run.run_id, {VERSION_TAG: f"{name}/{version.version}", SCORE_TAG: repr(evaluated.bits_per_byte)}
        )
        stage.conclude(f"{name} version {version.version} ({'new' if is_new else 'reused'}); {verdict}")
        return RegisterResult(name, version.version, is_new, champion, verdict)


def _lineage(run: Run, exported: ExportResult, evaluated: EvaluateResult) -> dict[str, str]:
    return {
        EXPORT_TAG: exported.key,
        MODEL_TAG: exported.model.model_id,
        "headrace.run_id": run.run_id,
        "headrace.run_key": run.spec.run_key,
        "headrace.export_digest": exported.commit.digest,
        "headrace.checkpoint_digest": str(exported.commit.body["checkpoint_digest"]),
        "headrace.step": str(exported.step),
        "headrace.dataset": run.spec.dataset_key,
        "headrace.dataset_digest": run.spec.dataset_digest,
        "headrace.tokenizer_digest": run.spec.tokenizer_digest,
        **({"headrace.init_from": run.spec.training.init_from} if run.spec.training.init_from else {}),
        **_score_tags(evaluated),
    }


def _score_tags(evaluated: EvaluateResult) -> dict[str, str]:
    return {SPEC_TAG: evaluated.digest, SCORE_TAG: repr(evaluated.bits_per_byte)}


def _decide(
    registry: Registry, version: VersionRecord, compare_with: Callable[[VersionRecord], Comparison]
) -> tuple[bool, str]:
    """Whether this version is the champion now, and why."""
    holder = registry.version_by_alias(version.name, CHAMPION)
    if holder is not None and holder.version == version.version:
        return True, "it is the champion"
    verdict = "it is the champion, as the first"
    if holder is not None:
        try:
            found = compare_with(holder)
        except (NotFound, DamagedData, InputError) as error:
            return False, f"the champion stays version {holder.version}, which cannot be compared: {error}"
        if not found.better:
            return False, (
                f"the champion stays version {holder.version}: {found.theirs:.4f} bits per byte{found.how}, "
                f"against {found.mine:.4f}"
            )
        verdict = (
            f"it replaces version {holder.version} as champion: {found.mine:.4f} bits per byte against "
            f"{found.theirs:.4f}{found.how}"
        )
    fault_point("alias.before")
    registry.set_alias(version.name, CHAMPION, version.version)
    return True, verdict
