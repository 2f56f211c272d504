"""What is done about a loss that is not finite, or that jumps."""

from typing import Literal

from headrace.config import Part, execution


class StabilityConfig(Part):
    """The answer to a bad batch. What was done is part of the run's history, so it may be changed at any time."""

    on_nonfinite: Literal["stop", "skip", "rewind"] = execution(
        "stop",
        description="answer to a loss or gradient that is not finite: stop the run, skip the batch, or rewind to an "
        "older checkpoint and pass over the batches that led there",
    )
    on_spike: Literal["ignore", "stop", "skip", "rewind"] = execution(
        "ignore", description="answer to a loss far above the usual one: as on_nonfinite, or ignore it"
    )
    spike_window: int = execution(
        64,
        description="steps whose losses say what is usual; no loss is a spike before there are as many",
        ge=8,
        le=4096,
    )
    spike_deviations: float = execution(
        8.0,
        description="a spike lies this many deviations above the median of the window (a deviation is 1.4826 times the "
        "median absolute deviation, which is the standard deviation of a normal distribution)",
        gt=0,
        le=1e6,
    )
    rewind_batches: int = execution(
        16, description="batches that a rewind passes over: the bad one and those before it", ge=1, le=10**6
    )
    max_interventions: int = execution(
        8, description="skipped batches and rewinds of the whole run; the next one stops it instead", ge=0, le=10_000
    )
