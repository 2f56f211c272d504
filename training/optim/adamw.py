"""Fused AdamW with its state made at once, so that a checkpoint can be read into it before the first step."""

from collections.abc import Iterable

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from training.optim.config import OptimizerConfig


def build_adamw(parameters: Iterable[nn.Parameter], config: OptimizerConfig) -> AdamW:
    """AdamW over two groups: matrices decay, everything of one dimension (norms, biases) does not."""
    parameters = list(parameters)
    decayed = [parameter for parameter in parameters if parameter.ndim >= 2]
    plain = [parameter for parameter in parameters if parameter.ndim < 2]
    groups = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    optimizer = AdamW(
        [group for group in groups if group["params"]],
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=True,
    )
    for parameter in parameters:
        # AdamW would make these lazily in its first step: then there would be nothing to load a checkpoint into.
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
            "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
        }
    return optimizer


def set_learning_rate(optimizer: Optimizer, learning_rate: float) -> None:
    """Use `learning_rate` in the next step, in every group."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
