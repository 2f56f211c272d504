"""Reading a checkpoint: the storage side of torch.distributed.checkpoint's load, every byte verified.

A chunk is always read whole and its SHA-256 compared before any of its values is used, also when a rank needs only a
part of it because the number of ranks changed. A load under another layout therefore reads the chunks it touches, not
only the rows it needs.
"""

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from headrace.commit import Commit
from headrace.digest import sha256_bytes
from headrace.errors import DamagedData, InputError, NotFound
from headrace.storage import Storage
from training.checkpoint.format import (
    METADATA_NAME,
    Chunk,
    Item,
    decode_metadata,
    dtype_name,
    tensor_from_bytes,
    to_dcp_metadata,
)


def read_metadata(storage: Storage, prefix: str, commit: Commit) -> dict[str, Item]:
    """The tensors of a committed checkpoint. Raises DamagedData when metadata.json is not the committed one."""
    key = f"{prefix}/{METADATA_NAME}"
    where = storage.url(key)
    entry = commit.files.get(METADATA_NAME)
    if entry is None:
        raise DamagedData(f"The commit of {prefix} does not list {METADATA_NAME}.")
    try:
        data = storage.read_bytes(key)
    except NotFound as error:
        raise DamagedData(f"{where} is missing, though its commit lists it.") from error
    if sha256_bytes(data) != entry.sha256:
        raise DamagedData(f"{where} has {len(data):,} bytes that are not those of its commit (SHA-256 differs).")
    items = decode_metadata(data, where)
    unlisted = {chunk.file for item in items.values() for chunk in item.chunks} - set(commit.files)
    if unlisted:
        raise DamagedData(f"{where} names files that its commit does not list: {', '.join(sorted(unlisted))}.")
    return items


def read_chunk(storage: Storage, prefix: str, name: str, chunk: Chunk, dtype: torch.dtype) -> Tensor:
    """One chunk as a tensor. Raises DamagedData naming the file, the tensor and the offset when a byte is wrong."""
    key = f"{prefix}/{chunk.file}"
    try:
        data = storage.read_range(key, chunk.start, chunk.length)
    except NotFound as error:
        raise DamagedData(f"{storage.url(key)} is missing, though its commit lists it.") from error
    if sha256_bytes(data) != chunk.sha256:
        raise DamagedData(
            f"{storage.url(key)} is damaged: the {chunk.length:,} bytes from offset {chunk.start:,} ({name}, rows from "
            f"{list(chunk.offsets)}) do not have the SHA-256 that was saved with them."
        )
    return tensor_from_bytes(bytearray(data), dtype, chunk.sizes)


def read_tensors(
    storage: Storage, prefix: str, commit: Commit, *, wanted: Callable[[str], bool] | None = None
) -> dict[str, Tensor]:
    """Whole tensors of a checkpoint (those `wanted` by name) on CPU, without any process group; raises DamagedData."""
    items = read_metadata(storage, prefix, commit).items()
    return {name: read_tensor(storage, prefix, name, item) for name, item in items if wanted is None or wanted(name)}


def read_tensor(storage: Storage, prefix: str, name: str, item: Item) -> Tensor:
    """One whole tensor, put together from its chunks; raises DamagedData."""
    tensor = torch.empty(item.shape, dtype=item.dtype)
    for chunk in item.chunks:
        _part(tensor, chunk.offsets, chunk.sizes).copy_(read_chunk(storage, prefix, name, chunk, item.dtype))
    return tensor


def require_fit(items: Mapping[str, Item], tensors: Mapping[str, Tensor], where: str) -> None:
    """Raise InputError naming what differs, when the tensors to be filled are not those that were saved."""
    problems = []
    for name, tensor in tensors.items():
        item = items.get(name)
        if item is None:
            problems.append(f"{name} is missing there")
        elif item.shape != tuple(tensor.shape):
            problems.append(f"{name} has shape {list(item.shape)} there and {list(tensor.shape)} here")
        elif item.dtype != tensor.dtype:
            problems.append(f"{name} is {dtype_name(item.dtype)} there and {dtype_name(tensor.dtype)} here")
    unused = [name for name in items if name not in tensors and not name.startswith("rng.")]
    problems.extend(f"{name} exists only there" for name in unused)
    if problems:
        shown = "; ".join(problems[:4]) + (f"; and {len(problems) - 4} more" if len(problems) > 4 else "")
        raise InputError(f"The checkpoint at {where} is of another model: {shown}.")


class CheckpointReader(StorageReader):
    """Reads one committed checkpoint into the tensors that a load planner names."""

    def __init__(self, storage: Storage, prefix: str, items: Mapping[str, Item]) -> None:
        """`items` come from `read_metadata`, so they are verified."""
        self._storage = storage
        self._prefix = prefix
        self._metadata = to_dcp_metadata(items)
        self._dtypes = {name: item.dtype for name, item in items.items()}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing to forget: one reader reads one checkpoint."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:  # noqa: ARG002 - torch's interface
        """What the planner plans from."""
        return self._metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to prepare."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Each rank reads what it needs."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Each rank reads what it needs."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read and verify every chunk that the plan touches, once, in the order of the files."""
        for chunk, items in self._by_chunk(plan.items):
            name = items[0].storage_index.fqn
            tensor = read_chunk(self._storage, self._prefix, name, chunk, self._dtypes[name])
            for item in items:
                target = planner.resolve_tensor(item).detach()
                target.copy_(_part(tensor, item.storage_offsets, item.lengths))
                planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:  # noqa: ARG003 - torch's interface
        """Never chosen by an address: this reader is always passed explicitly."""
        return False

    def _by_chunk(self, items: Iterable[ReadItem]) -> list[tuple[Chunk, list[ReadItem]]]:
        grouped: dict[Chunk, list[ReadItem]] = defaultdict(list)
        for item in items:
            # Equal chunks of two tensors have different places, unless both are empty: the name keeps those apart.
            grouped[self._metadata.storage_data[item.storage_index]].append(item)
        return sorted(grouped.items(), key=lambda entry: (entry[0].file, entry[0].start))


def _part(tensor: Tensor, offsets: Iterable[int], sizes: Iterable[int]) -> Tensor:
    """The view of a tensor from these offsets, of these sizes."""
    return tensor[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))]
