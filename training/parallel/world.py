"""One rank's place among all ranks: its numbers, its device, and the few collectives that the loop needs."""

import contextlib
import ctypes
import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from headrace.errors import ConfigError
from training.parallel.config import LayoutConfig

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Names of two parameters in glibc's malloc.h."""
_LARGEST = 2**31 - 1

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


@dataclass(frozen=True)
class World:
    """The ranks of one attempt, as one of them sees it. One rank alone has no mesh and sends nothing."""

    rank: int
    world_size: int
    device: torch.device
    mesh: DeviceMesh | None = None

    @property
    def dp_rank(self) -> int:
        """This rank among the data-parallel ranks."""
        return self.rank

    @property
    def dp(self) -> int:
        """Data-parallel ranks: the parts that a global batch is divided into."""
        return self.world_size

    @property
    def is_main(self) -> bool:
        """Whether this is the rank that writes events."""
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """Add `values` over all ranks, in place; every rank gets the same bits."""
        if self.mesh is not None:
            dist.all_reduce(values, group=self.mesh.get_group())
        return values

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.sum(torch.zeros(1, device=self.device))


def detect_device(wanted: Literal["auto", "cpu", "cuda"], local_rank: int = 0) -> torch.device:
    """The device of one rank; raises ConfigError when CUDA is wanted and there is none for this rank."""
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    found = torch.cuda.device_count()
    if local_rank >= found:
        raise ConfigError(
            f"layout.device is {wanted} and this machine has {found} CUDA devices, but {local_rank + 1} ranks or more "
            "run on it. Lower launch.ranks_per_node or set layout.device to cpu."
        )
    return torch.device("cuda", local_rank)


def join_world(layout: LayoutConfig, *, timeout_seconds: float) -> World:
    """Meet the other ranks that torchrun started (RANK, WORLD_SIZE, LOCAL_RANK in the environment).

    Without torchrun this process is the only rank. Collectives give up after `timeout_seconds`: a hang is found
    earlier, from the heartbeats, and this is the net below. Raises ConfigError when the layout does not fill the world.
    """
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if layout.dp_shard not in (-1, world_size):
        raise ConfigError(
            f"layout.dp_shard is {layout.dp_shard}, but {world_size} ranks were started; they must be equal, "
            "or dp_shard -1 to take every rank."
        )
    device = detect_device(layout.device, int(os.environ.get("LOCAL_RANK", "0")))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        BACKENDS[device.type],
        store=None if "MASTER_ADDR" in os.environ else dist.HashStore(),  # type: ignore[attr-defined]  # public, not in the stubs
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_seconds),
        device_id=device if device.type == "cuda" else None,
    )
    return meet(device)


def meet(device: torch.device | None = None) -> World:
    """The world of the process group that this process is in."""
    device = device or torch.device("cpu")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mesh = None
    if world_size > 1:
        mesh = init_device_mesh(device.type, (world_size,), mesh_dim_names=("dp_shard",))
    return World(rank, world_size, device, mesh)


def keep_freed_memory() -> None:
    """Have the C library keep freed memory for the next tensor instead of giving it back; call before tensors exist.

    glibc maps every block above 32 MiB anew, so the logits of each step would cost a page fault per 4 KiB: 12 % of a
    step's CPU time at a vocabulary of 4096. No-op where the C library is another one.
    """
    with contextlib.suppress(AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, _LARGEST)
        mallopt(_M_TRIM_THRESHOLD, _LARGEST)


def leave_world() -> None:
    """Take the process group down, where there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()
