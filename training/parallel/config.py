"""How one training run is spread over ranks."""

from typing import Literal

from headrace.config import Part, execution


class LayoutConfig(Part):
    """The degrees of the parallel axes; the result does not depend on them."""

    dp_shard: int = execution(
        -1,
        description="data-parallel ranks that share one copy of the state (FSDP2); -1 takes every rank",
        ge=-1,
        le=1024,
    )
    micro_batch_size: int = execution(
        8, description="sequences in one forward pass of one data-parallel rank", ge=1, le=2**16
    )
    device: Literal["auto", "cpu", "cuda"] = execution(
        "auto", description="where ranks compute; auto takes CUDA when there is one"
    )
