"""What the commands below `headrace checkpoints` do: list, verify, delete, export and compare."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flows.look import RunPlace, find_place
from headrace.environment import work_path
from headrace.errors import ConfigError, DamagedData, HeadraceError, InputError
from headrace.lease import hold_if_free, read_holder
from headrace.storage import check_key
from headrace.terminal import Terminal
from tasks.child import run_module
from tasks.runs import lease_key, read_run
from training.checkpoint.catalog import COMMIT_NAME, committed_on_chain, newest_at, newest_commit, verified
from training.checkpoint.comparison import ComparisonSpec, Side
from training.checkpoint.config import CheckpointConfig
from training.checkpoint.garbage import Collection, carry_out, look
from training.checkpoint.history import folders_of, references_to
from training.checkpoint.retention import Reference, Verdict
from training.checkpoint.verify import Finding, inspect
from training.export.spec import ExportSpec
from training.launch.attempts import chain, is_on_chain, read_attempts


@dataclass(frozen=True)
class Line:
    """One folder below a run's checkpoints."""

    step: int
    attempt: int
    state: str
    """usable, damaged, beside the chain, or incomplete."""
    num_bytes: int
    ranks: int | None
    """That wrote it, where its commit says so."""
    kept_for: list[str]
    """Who refers to it."""
    reason: str = ""
    """Why it is not usable."""


class InUse(HeadraceError):
    """A command works on the run."""


def list_checkpoints(place: RunPlace) -> list[Line]:
    """Everything below the run's `checkpoints/`, newest first; contents are not read."""
    links = chain(read_attempts(place.storage, place.prefix))
    references = references_to(place.storage, place.prefix, place.run_id)
    lines = []
    for (step, attempt, prefix), sizes in folders_of(place.storage, place.prefix).items():
        state, reason, ranks = "usable", "", None
        if f"{prefix}/{COMMIT_NAME}" not in sizes:
            state, reason = "incomplete", "it has no commit: a save that has not ended, or that was killed"
        elif not is_on_chain(links, attempt=attempt, step=step):
            state, reason = "beside", "a later attempt went back behind it"
        else:
            try:
                commit = verified(place.storage, step, attempt, prefix).commit
                ranks = commit.body.get("layout", {}).get("world_size")
            except DamagedData as error:
                state, reason = "damaged", str(error)
        kept_for = [r.reason for r in references if _means(r, step, attempt)]
        lines.append(Line(step, attempt, state, sum(sizes.values()), ranks, kept_for, reason))
    return lines


def _means(reference: Reference, step: int, attempt: int) -> bool:
    return reference.step == step and reference.attempt in (None, attempt)


# ---------------------------------------------------------------------------------------------------------- verify


def verify_checkpoints(place: RunPlace, *, step: int | None, content: bool, terminal: Terminal) -> list[Finding]:
    """Look at the run's checkpoints on the chain, or at the one of `step`; raises InputError when there is none."""
    on_chain = list(committed_on_chain(place.storage, place.prefix))
    wanted = [entry for entry in on_chain if step is None or entry[0] == step]
    if step is not None and not wanted:
        there = ", ".join(str(entry[0]) for entry in reversed(on_chain)) or "none"
        raise InputError(f"The run {place.name} has no committed checkpoint of step {step}; its steps are: {there}.")
    found = [_inspect(place, *entry, content=False) for entry in wanted]
    if not content:
        return found
    with terminal.stage("verify", total=sum(finding.num_bytes for finding in found), unit="bytes") as stage:
        read = 0

        def on_bytes(count: int) -> None:
            nonlocal read
            read += count
            stage.update(read)

        return [_inspect(place, *entry, content=True, on_bytes=on_bytes) for entry in wanted]


def _inspect(
    place: RunPlace,
    step: int,
    attempt: int,
    prefix: str,
    *,
    content: bool,
    on_bytes: Callable[[int], None] = lambda _: None,
) -> Finding:
    return inspect(place.storage, prefix, step=step, attempt=attempt, content=content, on_bytes=on_bytes)


# -------------------------------------------------------------------------------------------------------------- gc


def collect(place: RunPlace, *, keep_last: int | None, dry_run: bool, terminal: Terminal) -> Collection:
    """Decide what goes and, unless `dry_run`, delete it. Raises InUse when a command works on the run."""
    if dry_run:
        return _look(place, keep_last, terminal)
    with hold_if_free(place.storage, lease_key(place.run_id)) as free:
        if not free:
            holder = read_holder(place.storage, lease_key(place.run_id))
            who = f"process {holder.pid} on {holder.host}" if holder else "another command"
            raise InUse(
                f"The run {place.name} ({place.run_id}) is worked on by {who}, which deletes old checkpoints itself. "
                "Give the command again when it has ended, or see what would go with --dry-run."
            )
        run = read_run(place.storage, place.run_id)
        return carry_out(place.storage, run, _look(place, keep_last, terminal))


def _look(place: RunPlace, keep_last: int | None, terminal: Terminal) -> Collection:
    with terminal.waiting(f"Reading back the newest checkpoint of {place.name} ..."):
        return look(place.storage, read_run(place.storage, place.run_id), _policy(place, keep_last))


def _policy(place: RunPlace, keep_last: int | None) -> CheckpointConfig:
    """What the newest attempt was told to keep; before the first one, what the run was."""
    attempts = read_attempts(place.storage, place.prefix)
    policy = attempts[-1].checkpoint if attempts else read_run(place.storage, place.run_id).checkpoint
    return policy if keep_last is None else policy.model_copy(update={"keep_last": keep_last})


def collection_document(place: RunPlace, found: Collection, *, dry_run: bool) -> dict[str, Any]:
    """A collection as one JSON value."""
    plan = found.plan
    return {
        "run_id": place.run_id,
        "name": place.name,
        "dry_run": dry_run,
        "read_back": plan.newest_whole,
        "keep": [_verdict(verdict) for verdict in plan.keep],
        "delete": [_verdict(verdict) for verdict in plan.delete],
        "sweep": [_verdict(verdict) for verdict in plan.sweep],
        "uploads": list(found.uploads),
        "bytes": found.num_bytes,
        "complete": found.complete,
    }


def _verdict(verdict: Verdict) -> dict[str, Any]:
    return {
        "step": verdict.step,
        "attempt": verdict.attempt,
        "bytes": verdict.num_bytes,
        "reason": verdict.reason,
    }


# ------------------------------------------------------------------------------------------------- export and compare


def export_checkpoint(
    place: RunPlace, folder: Path, *, step: int | None, dtype: str, terminal: Terminal
) -> dict[str, Any]:
    """Write a checkpoint's weights and tokenizer as a Hugging Face model into `folder`, new or empty.

    The same export that is there already counts as done. Raises InputError for another content of the folder.
    """
    target = folder.expanduser().absolute()
    if target.exists() and not target.is_dir():
        raise InputError(f"{target} is a file. Name a new or an empty folder.")
    if target.is_dir() and any(target.iterdir()) and not (target / COMMIT_NAME).is_file():
        raise InputError(f"The folder {target} is not empty, and holds no export. Name a new or an empty folder.")
    try:
        check_key(target.name)
    except ValueError as error:
        raise InputError(f"The folder {target} cannot be used: {error}.") from None
    checkpoint = (
        newest_commit(place.storage, place.prefix) if step is None else newest_at(place.storage, place.prefix, step)
    )
    if checkpoint is None:
        raise InputError(f"The run {place.name} has no usable checkpoint yet.")
    spec = ExportSpec.model_validate(
        {
            "storage_root": place.storage.root_url,
            "run_id": place.run_id,
            "checkpoint": checkpoint.restore_point,
            "target": target.name,
            "target_root": str(target.parent),
            "dtype": dtype,
        }
    )
    with terminal.stage("export") as stage:
        scratch = work_path() / place.run_id / "export-by-hand"
        document = spec.model_dump(mode="json")
        report = run_module("training.export.main", document, folder=scratch, on_report=lambda _: None)
        stage.conclude(f"step {report['step']}, {report['bytes'] / 1e6:.1f} MB")
    return {"run_id": place.run_id, "attempt": checkpoint.attempt, **report, "target": str(target)}


def replay_step(place: RunPlace, step: int, terminal: Terminal) -> dict[str, Any]:
    """Do a step of a run again in one process. Raises InputError for a step that the run never made."""
    document = {"storage_root": place.storage.root_url, "run_id": place.run_id, "step": step}
    with terminal.stage("replay", unit="step") as stage:

        def on_report(report: dict[str, Any]) -> None:
            if "step" in report:
                stage.update(report["step"])

        report = run_module(
            "training.replay", document, folder=work_path() / place.run_id / "replay", on_report=on_report
        )
        stage.conclude(f"steps {report['start'] + 1} to {step}")
    return report


def compare_checkpoints(first: str, second: str, terminal: Terminal) -> dict[str, Any]:
    """Compare RUN@STEP with RUN@STEP. Raises InputError when one does not exist, DamagedData when one is damaged."""
    with terminal.waiting("Looking for the two checkpoints ..."):
        spec = ComparisonSpec(first=_side(first), second=_side(second))
    with terminal.stage("compare", unit="tensor") as stage:

        def on_report(report: dict[str, Any]) -> None:
            if "progress" in report:
                stage.update(report["progress"], total=report["total"])

        scratch = work_path() / spec.first.run_id / "compare"
        report = run_module(
            "training.checkpoint.compare", spec.model_dump(mode="json"), folder=scratch, on_report=on_report
        )
        stage.conclude("equal" if report["equal"] else "not equal")
    return report


def _side(text: str) -> Side:
    name, separator, step = text.rpartition("@")
    if not separator or not name or not step.isdecimal():
        raise ConfigError(f"{text!r} names no checkpoint. Give RUN@STEP, for example quickstart@512.")
    place = find_place(name)
    newest_at(place.storage, place.prefix, int(step))  # refused here: the other process takes seconds to start
    return Side(storage_root=place.storage.root_url, run_id=place.run_id, step=int(step))
