"""The copy of the training state that a save writes from, while training goes on changing the original.

The buffers are allocated once and used by every save: faulting in fresh memory costs many times the copy itself
(6 to 37 times, measured on CPU). On CUDA they are pinned, so that the copies run at the speed of the bus.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_local_save_plan
from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.tensor import DTensor


class StagingBuffers(AsyncStager):
    """One CPU buffer for this rank's part of every tensor of the state."""

    _synchronize_after_execute = False

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._plan: SavePlan | None = None

    @torch.no_grad()
    def stage(self, state_dict: Mapping[str, Tensor]) -> dict[str, Any]:
        """Copy the state as it is now. Call it again only when the save that uses the last copy is over."""
        if set(self._buffers) != set(state_dict):
            self._allocate(state_dict)
        on_accelerator = False
        for name, tensor in state_dict.items():
            local = _local(tensor)
            on_accelerator |= local.device.type != "cpu"
            self._buffers[name].copy_(local, non_blocking=True)
        if on_accelerator:
            torch.accelerator.synchronize()
        return dict(self._buffers)

    @property
    def num_bytes(self) -> int:
        """Bytes of this rank's part of the state."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def plan(self, state_dict: Mapping[str, Tensor]) -> SavePlan:
        """Which part of which tensor this rank holds; it is the same in every save of a run's attempt."""
        if self._plan is None or {item.index.fqn for item in self._plan.items} != set(state_dict):
            self._plan = create_default_local_save_plan(dict(state_dict), is_coordinator=False)
        return self._plan

    def synchronize_staging(self) -> None:
        """Nothing to wait for: `stage` returns when the copy is made."""
        return

    def close(self) -> None:
        """Free the buffers."""
        self._buffers.clear()

    def _allocate(self, state_dict: Mapping[str, Tensor]) -> None:
        self._buffers = {}
        for name, tensor in state_dict.items():
            local = _local(tensor)
            self._buffers[name] = torch.empty(local.shape, dtype=local.dtype, pin_memory=local.device.type == "cuda")


class StagedSavePlanner(DefaultSavePlanner):
    """Plans a save of staged buffers: which parts they are was planned from the live tensors."""

    def __init__(self, local_plan: SavePlan) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._local_plan = local_plan

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,  # noqa: ARG002 - torch's interface
        is_coordinator: bool = False,
    ) -> None:
        """Take the staged buffers."""
        self.state_dict = state_dict
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> SavePlan:
        """The plan made from the live tensors."""
        self.plan = self._local_plan
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        """This rank's buffer of a tensor."""
        return self.state_dict[index.fqn]


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
