"""Rules across the fields of a part, and the words for the ways out that they offer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Rule:
    """What the values of several fields must keep together."""

    needs: tuple[str, ...]
    """The fields that it looks at, dotted, seen from its part: it is asked when these are valid, whatever else is not.
    """
    fault: Callable[[Any], str | None]
    """One sentence on how the part breaks it, with values that do not; None when it is kept."""


def nearest_multiples(value: int, step: int, most: int) -> list[int]:
    """The multiples of `step` next to `value`, from `step` up to `most`: two, one or none."""
    below = min(value, most) // step * step
    return [multiple for multiple in (below, below + step) if step <= multiple <= most]


def one_of(values: Sequence[int]) -> str:
    """`1`, `1 or 2`, `1, 2 or 4`."""
    *others, last = map(str, values)
    return f"{', '.join(others)} or {last}" if others else last
