"""The model as the ranks hold it, and one optimizer step's worth of forward and backward passes.

The loss of a step is the sum of the token losses divided by the number of valid tokens *of the whole global batch*,
so any division into ranks and micro-batches gives the same gradient. FSDP must therefore only add gradients, never
average them.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from training.batches import Batch
from training.model.config import ModelConfig
from training.model.init import initialise
from training.model.llama import Decoder
from training.model.loss import token_loss_sum
from training.parallel.world import World

PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
MASTER_TYPES = {"float32": torch.float32, "bfloat16": torch.float32, "float64": torch.float64}
"""Type of the weights that the optimizer updates, and of the gradients that are added up."""


class Engine:
    """A decoder divided over a world: computes losses and gradients, and logits for an evaluation."""

    def __init__(self, model: Decoder, world: World, precision: str) -> None:
        self.model = model
        self.world = world
        self.precision = precision
        # Taken once: while FSDP holds gathered weights, `named_parameters` gives those and not the masters.
        self.parameters: dict[str, nn.Parameter] = dict(model.named_parameters())
        """The master weights by FQN: this rank's shards under FSDP."""

    @classmethod
    def build(cls, config: ModelConfig, world: World, *, precision: str, seed: int) -> "Engine":
        """Make the model without memory, divide it, then give it the initial weights that `seed` stands for."""
        with torch.device("meta"):
            model = Decoder(config).to(MASTER_TYPES[precision])
        if world.mesh is not None:
            shard(model, world, precision)
        model.to_empty(device=world.device)
        if config.tie_embeddings:
            model.tie_embeddings()
        initialise(model, config, seed)
        return cls(model, world, precision)

    def forward_backward(self, batch: Batch, num_valid: int, micro_batch_size: int) -> Tensor:
        """Add the gradient of this rank's share of the batch; returns its share of the loss (float64, detached).

        `num_valid` counts the tokens with a loss in the global batch: the sum of all ranks' shares is the mean loss.
        """
        total = torch.zeros((), dtype=torch.float64, device=self.world.device)
        micro_batches = list(batch.split(micro_batch_size))
        for number, micro_batch in enumerate(micro_batches):
            self._sync_gradients(last=number == len(micro_batches) - 1)
            loss = token_loss_sum(self.forward(micro_batch.tokens_BT), micro_batch.targets_BT) / num_valid
            loss.backward()
            total += loss.detach()
        return total

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Logits (B, T, V), computed in the engine's precision."""
        with self._autocast():
            return cast(Tensor, self.model(tokens_BT))

    def infer(self, tokens_BT: Tensor) -> Tensor:
        """Logits without a gradient; leaves no gathered weights behind."""
        with torch.no_grad():
            logits_BTV = self.forward(tokens_BT)
        if isinstance(self.model, FSDPModule):
            # The root keeps its weights gathered for a backward pass that does not come here.
            self.model.reshard()
        return logits_BTV

    def _autocast(self) -> AbstractContextManager[object]:
        if self.world.mesh is None and self.precision == "bfloat16":
            return torch.autocast(self.world.device.type, torch.bfloat16)
        return nullcontext()

    def _sync_gradients(self, *, last: bool) -> None:
        """Reduce gradients over ranks once a step, after the last micro-batch."""
        if isinstance(self.model, FSDPModule):
            self.model.set_requires_gradient_sync(last)


def shard(model: nn.Module, world: World, precision: str) -> None:
    """Divide every block, then the rest, over the data-parallel ranks."""
    assert world.mesh is not None
    policy = MixedPrecisionPolicy(param_dtype=PRECISIONS[precision], reduce_dtype=MASTER_TYPES[precision])
    decoder = cast(Decoder, model)
    for block in decoder.layers.values():
        fully_shard(block, mesh=world.mesh, mp_policy=policy)
    fully_shard(decoder, mesh=world.mesh, mp_policy=policy)
    for module in decoder.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # Otherwise torch asks for PREMUL_SUM with a factor of 1, which gloo does not have.
            module.set_force_sum_reduction_for_comms(True)
