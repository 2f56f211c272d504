"""The token loss: always a sum, so that whoever adds parts up decides what to divide by."""

import torch
from torch import Tensor
from torch.nn import functional as F

IGNORED = -100
"""Target of a position that has no loss."""


def token_loss_sum(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Sum of the cross-entropies (nats) over valid targets, in float32 or the logits' wider type."""
    logits_BTV = logits_BTV.to(torch.promote_types(logits_BTV.dtype, torch.float32))
    return F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten(), reduction="sum", ignore_index=IGNORED)


def token_losses(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Cross-entropy (nats) of every position, 0 where the target is ignored; type as `token_loss_sum`."""
    logits_BTV = logits_BTV.to(torch.promote_types(logits_BTV.dtype, torch.float32))
    losses = F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten(), reduction="none", ignore_index=IGNORED)
    return losses.view(targets_BT.shape)
