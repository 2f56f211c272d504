"""The optimizer and the course of its learning rate."""

from typing import Literal

from headrace.config import Part, identity


class OptimizerConfig(Part):
    """AdamW with decoupled weight decay."""

    learning_rate: float = identity(3e-3, description="peak learning rate, reached after the warm-up", gt=0)
    beta1: float = identity(0.9, description="decay of the running mean of the gradient", ge=0, lt=1)
    beta2: float = identity(0.95, description="decay of the running mean of the squared gradient", ge=0, lt=1)
    eps: float = identity(1e-8, description="added to the root of the second moment", gt=0)
    weight_decay: float = identity(0.1, description="decoupled decay of matrices; norms are never decayed", ge=0)
    max_grad_norm: float = identity(1.0, description="global L2 norm that gradients are clipped to", gt=0)


class ScheduleConfig(Part):
    """Linear warm-up, then a cosine down to a fraction of the peak."""

    kind: Literal["cosine"] = identity("cosine", description="shape of the learning rate after the warm-up")
    warmup_steps: int = identity(20, description="optimizer steps from zero to the peak learning rate", ge=0, le=10**8)
    final_fraction: float = identity(
        0.1, description="learning rate at the last step, as a share of the peak", ge=0, le=1
    )
