"""What is wrong with a run: findings with their evidence, from its attempts and events alone, the gravest first."""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from training.health.goodput import ENDED, Event
from training.launch.attempts import AttemptRecord

Verdict = Literal[
    "rank died",
    "hang",
    "out of memory",
    "failed",
    "no progress",
    "interrupted",
    "spike",
    "damaged checkpoint",
    "damaged document",
    "slow data",
    "slow save",
    "running",
    "stopped",
    "finished",
    "never started",
]

EXEMPT_STEPS = 5
"""First steps of an attempt, which say little about the others."""

SLOW_DATA_SHARE = 0.2
"""Share of the step time that waiting for data may take."""

SLOW_SAVE_STEPS = 1.0
"""Usual step times for which one save may stop the training."""

STUCK_ATTEMPTS = 3

_MEMORY_ERRORS = ("MemoryError", "OutOfMemoryError", "OutOfMemory")


@dataclass(frozen=True)
class Finding:
    """One verdict, what it is judged by, and what to do."""

    verdict: Verdict
    evidence: tuple[str, ...]
    advice: str


def examine(
    attempts: Sequence[AttemptRecord],
    events: Mapping[int, Sequence[Event]],
    *,
    committed: Mapping[int, int],
    is_worked_on: bool,
) -> list[Finding]:
    """Everything that is to be said of a run; the first finding is the verdict.

    `committed` is the newest step that each attempt committed, on the chain or not, for those that committed any.
    """
    if not attempts:
        return [Finding("never started", (), "Give the command again; the log of the flow says why it ended.")]
    newest = attempts[-1].attempt
    state = _state(newest, events.get(newest, ()), is_worked_on)
    findings = [*_stuck(attempts, events, committed, state), *_spikes(events), *_damage(events)]
    findings += [*_slow_data(newest, events.get(newest, ())), *_slow_saves(newest, events.get(newest, ()))]
    calm = state.verdict in ("running", "stopped", "finished")
    return [*findings, state] if calm else [state, *findings]


def _state(attempt: int, events: Sequence[Event], is_worked_on: bool) -> Finding:
    """How the newest attempt stands."""
    end = next((event for event in reversed(events) if event["kind"] == ENDED), None)
    steps = [event["step"] for event in events if event["kind"] == "step"]
    reached = f"attempt {attempt} reached step {steps[-1]}" if steps else f"attempt {attempt} made no step"
    if end is None and any(event["kind"] == "finished" for event in events):
        return Finding("finished", (reached,), "")
    if end is None and is_worked_on:
        return Finding("running", (reached,), "")
    if end is None:
        advice = "The command or its machine was killed, and nobody works on the run: the same command continues it."
        return Finding("interrupted", (f"{reached} and has no end",), advice)
    evidence = (reached, str(end["message"]))
    if end["outcome"] == "finished":
        return Finding("finished", evidence, "")
    if end["outcome"] == "stopped":
        return Finding("stopped", evidence, "The same command continues it.")
    return Finding(_kind_of(end), evidence, _advice_for(_kind_of(end)))


def _kind_of(end: Event) -> Verdict:
    kind = str(end.get("error_kind") or "")
    if kind == "Hang":
        return "hang"
    if kind in _MEMORY_ERRORS:
        return "out of memory"
    return "rank died" if kind.startswith("SIG") else "failed"


def _advice_for(verdict: Verdict) -> str:
    return {
        "hang": "Look at the stacks in the attempt's folder; a machine that hangs again should be left out.",
        "out of memory": "Lower layout.micro_batch_size, or use more ranks.",
        "rank died": "If nobody killed it, look at the machine's kernel log; the next attempt continues by itself.",
    }.get(verdict, "Correct what the message says and give the same command again.")


def _stuck(
    attempts: Sequence[AttemptRecord],
    events: Mapping[int, Sequence[Event]],
    committed: Mapping[int, int],
    state: Finding,
) -> list[Finding]:
    """Attempts in a row, up to the newest, that ended without a commit."""
    count = 0
    for record in reversed(attempts):
        if record.attempt in committed:
            break
        count += 1
    if state.verdict in ("running", "stopped", "finished") or count < STUCK_ATTEMPTS:
        return []
    ends = [event for record in attempts[-count:] for event in events.get(record.attempt, ()) if event["kind"] == ENDED]
    reasons = Counter(str(event["message"]).partition(" Log: ")[0] for event in ends)
    evidence = (f"{count} attempts in a row committed nothing", *(f"{n} x {why}" for why, n in reasons.most_common(3)))
    return [Finding("no progress", evidence, "The cause is not of the kind that another attempt cures.")]


def _spikes(events: Mapping[int, Sequence[Event]]) -> list[Finding]:
    told = [
        f"attempt {attempt}, step {event['step']}: {event['reason']} "
        f"({'passed over' if event['kind'] == 'batch.skipped' else 'gone back for'})"
        for attempt, log in sorted(events.items())
        for event in log
        if event["kind"] in ("batch.skipped", "rewind.asked")
    ]
    if not told:
        return []
    advice = "Lower optimizer.learning_rate if there are many; `headrace replay` shows what leads to one."
    return [Finding("spike", tuple(told), advice)]


def _damage(events: Mapping[int, Sequence[Event]]) -> list[Finding]:
    told = [
        f"attempt {attempt} found the checkpoint of step {event['step']} damaged: {event['reason']}"
        for attempt, log in sorted(events.items())
        for event in log
        if event["kind"] == "checkpoint.damaged"
    ]
    return (
        [Finding("damaged checkpoint", tuple(told), "Ask who else writes to the store, and check its disks.")]
        if told
        else []
    )


def _slow_data(attempt: int, events: Sequence[Event]) -> list[Finding]:
    steps = [event for event in events if event["kind"] == "step"][EXEMPT_STEPS:]
    waited, spent = sum(event["data_seconds"] for event in steps), sum(event["step_seconds"] for event in steps)
    if not steps or waited <= SLOW_DATA_SHARE * spent:
        return []
    evidence = f"attempt {attempt} waited {waited:.1f} of {spent:.1f} s for data ({waited / spent:.0%} of its steps)"
    return [Finding("slow data", (evidence,), "Bring the store nearer, or copy the dataset to a local folder.")]


def _slow_saves(attempt: int, events: Sequence[Event]) -> list[Finding]:
    steps = [event["step_seconds"] for event in events if event["kind"] == "step"][EXEMPT_STEPS:]
    evidence = []
    stalls = [event["blocking_seconds"] for event in events if event["kind"] == "save.staged"][1:]
    if steps and stalls and statistics.median(stalls) > SLOW_SAVE_STEPS * statistics.median(steps):
        evidence.append(
            f"attempt {attempt}: a save stops the training for {statistics.median(stalls):.2f} s, a step takes "
            f"{statistics.median(steps):.2f} s"
        )
    for kind, what in (
        ("save.failed", "failed"),
        ("save.skipped", "were left out, the one before still being written"),
    ):
        if count := sum(event["kind"] == kind for event in events):
            evidence.append(f"attempt {attempt}: {count} saves {what}")
    if not evidence:
        return []
    return [Finding("slow save", tuple(evidence), "Raise checkpoint.save_every, or look at the store.")]


def as_document(findings: Sequence[Finding]) -> dict[str, Any]:
    """The findings as plain JSON values."""
    return {
        "verdict": findings[0].verdict,
        "findings": [
            {"verdict": finding.verdict, "evidence": list(finding.evidence), "advice": finding.advice}
            for finding in findings
        ],
    }
