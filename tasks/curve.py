"""The loss of a run as a short table: what its commits cover, thinned out."""

from collections.abc import Mapping, Sequence
from typing import Any

from headrace.mirror import Event
from headrace.storage import Storage
from tasks.shown import covered_events

ROWS = 20
"""Most rows of the table: it has to fit on a page."""


def loss_curve(storage: Storage, run_prefix: str, rows: int = ROWS) -> list[dict[str, Any]]:
    """Steps with their training loss and what was measured after them, the first and the last one included."""
    losses: dict[int, float] = {}
    scores: dict[int, float] = {}
    for event in covered_events(storage, run_prefix):
        if event["kind"] == "step":
            losses[event["step"]] = _number(event, "loss")
        elif event["kind"] == "evaluation":
            scores[event["step"]] = _number(event, "bits_per_byte")
    return [
        {
            "step": step,
            "training loss": _text(losses.get(step)),
            "validation bits per byte": _text(scores.get(step)),
        }
        for step in _thinned(sorted(losses), sorted(scores), rows)
    ]


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """The table in markdown; nothing when there are no rows."""
    if not rows:
        return ""
    names = list(rows[0])
    lines = ["| " + " | ".join(names) + " |", "|" + "---:|" * len(names)]
    return "\n".join([*lines, *("| " + " | ".join(str(row[name]) for name in names) + " |" for row in rows)])


def _thinned(steps: list[int], measured: list[int], rows: int) -> list[int]:
    """The steps that were measured, as far as they fit, and evenly spaced ones between them."""
    kept = set(_spread(measured, rows // 2))
    kept |= set(_spread(steps, rows - len(kept)))
    return sorted(kept)


def _spread(steps: list[int], number: int) -> list[int]:
    if len(steps) <= number:
        return steps
    return [steps[round(index * (len(steps) - 1) / (number - 1))] for index in range(number)]


def _number(event: Event, name: str) -> float:
    return float(event[name])  # also "nan" and "inf", which JSON does not have


def _text(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"
