"""Two checkpoints, tensor by tensor: what a comparison gets and gives, as documents. No torch here."""

from typing import Literal

from pydantic import Field, NonNegativeInt

from headrace.config import Part

Status = Literal["equal", "differs", "other shape", "only in the first", "only in the second"]


class Side(Part):
    """One of the two."""

    storage_root: str = Field(description="URL of the store")
    run_id: str = Field(description="the run that wrote it")
    step: NonNegativeInt = Field(description="completed optimizer steps; the checkpoint on the run's attempt chain")

    @property
    def run_prefix(self) -> str:
        """Storage key of the run's artifact root."""
        return f"runs/{self.run_id}/artifacts"


class ComparisonSpec(Part):
    """`python -m training.checkpoint.compare spec.json` reads this."""

    first: Side
    second: Side


class TensorDifference(Part):
    """What was found for one tensor."""

    name: str
    status: Status
    detail: str = Field("", description="shapes and types, when these differ")
    elements: NonNegativeInt = Field(0, description="elements of the tensor, or of the first one")
    differing: NonNegativeInt = Field(0, description="elements whose values differ; NaN equals NaN")
    max_abs_difference: float | None = Field(
        None, description="largest absolute difference; none when nothing differs, or a difference is not finite"
    )
