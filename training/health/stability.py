"""What a loss says about the run: judged from numbers that are the same on every rank, so all ranks decide alike.

The median and the median absolute deviation say what is usual, because the mean and the standard deviation follow the
very outliers that they should find (Leys et al. 2013, "Detecting outliers: do not use standard deviation around the
mean"). The losses of the window are part of the training state: a resumed run judges as the unbroken one does.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from training.health.config import StabilityConfig

Answer = Literal["stop", "skip", "rewind"]

NORMAL_DEVIATION = 1.4826
"""Standard deviation of a normal distribution in units of its median absolute deviation."""

LEAST_DEVIATION = 1e-3
"""Least deviation as a share of the median: in a window of equal losses the next digit is no spike."""


@dataclass(frozen=True)
class Verdict:
    """A batch that must not be applied, why, and what is done about it."""

    answer: Answer
    reason: str


def judge(config: StabilityConfig, recent: Sequence[float], loss: float, grad_norm: float) -> Verdict | None:
    """The verdict on a step, before it is applied; None when it may be.

    `recent` are the losses of the last applied steps, oldest first, of which the last `spike_window` count.
    """
    if not (math.isfinite(loss) and math.isfinite(grad_norm)):
        return Verdict(config.on_nonfinite, f"a loss of {loss} and a gradient norm of {grad_norm}")
    if config.on_spike == "ignore" or len(recent) < config.spike_window:
        return None
    window = recent[-config.spike_window :]
    usual = statistics.median(window)
    deviation = statistics.median(abs(value - usual) for value in window) * NORMAL_DEVIATION
    deviation = max(deviation, LEAST_DEVIATION * abs(usual))
    if loss <= usual + config.spike_deviations * deviation:
        return None
    far = (loss - usual) / deviation
    return Verdict(config.on_spike, f"a loss of {loss:.4g}, {far:.3g} deviations above the usual {usual:.4g}")


def remembered(config: StabilityConfig, recent: Sequence[float], loss: float) -> list[float]:
    """The losses to keep after a step that was applied."""
    if config.on_spike == "ignore":
        return []
    return [*recent, loss][-config.spike_window :]
