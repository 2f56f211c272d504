"""The learning rate of every step, as a pure function: nothing to save, nothing that can count twice."""

import math
from dataclasses import dataclass
from typing import Any

from training.optim.config import ScheduleConfig


@dataclass(frozen=True)
class Schedule:
    """Linear warm-up to `peak`, then half a cosine down to `final_fraction * peak` at the last step."""

    peak: float
    steps: int
    warmup_steps: int
    final_fraction: float

    @classmethod
    def of(cls, config: ScheduleConfig, *, peak: float, steps: int) -> "Schedule":
        """The schedule of a run of `steps` optimizer steps."""
        return cls(peak, steps, config.warmup_steps, config.final_fraction)

    def learning_rate(self, step: int) -> float:
        """Learning rate of the update that completes `step` (1 is the first; the last is `steps`)."""
        if step <= self.warmup_steps:
            return self.peak * step / self.warmup_steps
        share_done = min(1.0, (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps))
        cosine = 0.5 * (1.0 + math.cos(math.pi * share_done))
        return self.peak * (self.final_fraction + (1.0 - self.final_fraction) * cosine)

    def values(self) -> dict[str, Any]:
        """The schedule as JSON: a checkpoint records it, and a resume refuses another one."""
        return {
            "kind": "cosine",
            "peak": self.peak,
            "steps": self.steps,
            "warmup_steps": self.warmup_steps,
            "final_fraction": self.final_fraction,
        }
