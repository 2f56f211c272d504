"""The model as the ranks hold it, and one optimizer step's worth of forward and backward passes.

The loss of a step is the sum of the token losses divided by the number of valid tokens *of the whole global batch*,
so any division into ranks and micro-batches gives the same gradient. FSDP must therefore only add gradients, never
average them.

bfloat16 means: weights are kept, gradients are added up and the optimizer works in float32; the passes see a bfloat16
copy of the weights. FSDP makes that copy while it gathers; one rank alone makes it here, so the arithmetic is the same.
"""

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from training.batches import Batch
from training.model.config import ModelConfig
from training.model.init import initialise, load_weights
from training.model.llama import Decoder
from training.model.loss import token_loss_sum
from training.parallel.world import World

COMPUTE_TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
MASTER_TYPES = {"float32": torch.float32, "bfloat16": torch.float32, "float64": torch.float64}
"""Type of the weights that the optimizer updates, and of the gradients that are added up."""


class Engine:
    """A decoder divided over a world: computes losses and gradients, and logits for an evaluation."""

    def __init__(self, model: Decoder, world: World, precision: str) -> None:
        self.world = world
        # Taken once: while FSDP holds gathered weights, `named_parameters` gives those and not the masters.
        self.parameters: dict[str, nn.Parameter] = dict(model.named_parameters())
        """The master weights by FQN: this rank's shards under FSDP."""
        self._model = model
        self._copies: list[nn.Parameter] = []
        """The weights that the passes see, where they are not the masters, in the order of `parameters`."""
        if world.mesh is None and COMPUTE_TYPES[precision] != MASTER_TYPES[precision]:
            self._model = Decoder(model.config).to(world.device, COMPUTE_TYPES[precision])
            self._copies = list(self._model.parameters())

    @classmethod
    def build(cls, config: ModelConfig, world: World, *, precision: str, seed: int) -> "Engine":
        """An engine with the initial weights that `seed` stands for."""
        model = empty_decoder(config, world, precision)
        initialise(model, config, seed)
        return cls(model, world, precision)

    @classmethod
    def from_weights(
        cls, config: ModelConfig, weights: Mapping[str, Tensor], world: World, *, precision: str
    ) -> "Engine":
        """An engine with given weights: whole tensors by FQN."""
        engine = cls(empty_decoder(config, world, precision), world, precision)
        load_weights(engine.parameters, weights)
        return engine

    def forward_backward(self, batch: Batch, num_valid: int, micro_batch_size: int) -> Tensor:
        """Add the gradient of this rank's share of the batch; returns its share of the loss (float64, detached).

        `num_valid` counts the tokens with a loss in the global batch: the sum of all ranks' shares is the mean loss.
        """
        self._refresh_copies()
        total = torch.zeros((), dtype=torch.float64, device=self.world.device)
        micro_batches = list(batch.split(micro_batch_size))
        for number, micro_batch in enumerate(micro_batches):
            if isinstance(self._model, FSDPModule):
                # Gradients go over the ranks once a step, after the last micro-batch.
                self._model.set_requires_gradient_sync(number == len(micro_batches) - 1)
            logits_BTV = self._model(micro_batch.tokens_BT)
            loss = token_loss_sum(logits_BTV, micro_batch.targets_BT) / num_valid
            loss.backward()
            self._collect_gradients()
            total += loss.detach()
        return total

    def infer(self, tokens_BT: Tensor) -> Tensor:
        """Logits (B, T, V) without a gradient; leaves no gathered weights behind."""
        self._refresh_copies()
        with torch.no_grad():
            logits_BTV = cast(Tensor, self._model(tokens_BT))
        if isinstance(self._model, FSDPModule):
            # The root keeps its weights gathered for a backward pass that does not come here.
            self._model.reshard()
        return logits_BTV

    def _refresh_copies(self) -> None:
        if self._copies:
            with torch.no_grad():
                torch._foreach_copy_([*self._copies], [*self.parameters.values()])

    def _collect_gradients(self) -> None:
        """Add the copies' gradients of one micro-batch to those of the masters, in the masters' type."""
        for master, copy in zip(self.parameters.values(), self._copies, strict=False):
            assert copy.grad is not None
            if master.grad is None:
                master.grad = copy.grad.to(master.dtype)
            else:
                master.grad += copy.grad
            copy.grad = None


def empty_decoder(config: ModelConfig, world: World, precision: str) -> Decoder:
    """A decoder in the masters' type, made without memory, then divided; its weights are still to be filled."""
    with torch.device("meta"):
        model = Decoder(config).to(MASTER_TYPES[precision])
    if world.mesh is not None:
        shard(model, world, precision)
    model.materialise(world.device)
    return model


def shard(model: Decoder, world: World, precision: str) -> None:
    """Divide every block, then the rest, over the data-parallel ranks."""
    assert world.mesh is not None
    policy = MixedPrecisionPolicy(param_dtype=COMPUTE_TYPES[precision], reduce_dtype=MASTER_TYPES[precision])
    for block in model.layers.values():
        fully_shard(block, mesh=world.mesh, mp_policy=policy)
    fully_shard(model, mesh=world.mesh, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # Otherwise torch asks for PREMUL_SUM with a factor of 1, which gloo does not have.
            module.set_force_sum_reduction_for_comms(True)
