"""Writing one checkpoint: the storage side of torch.distributed.checkpoint's save, in our format.

Protocol, in this order and on every kind of store:
    every rank      its data file, complete or not at all, into the fresh folder of this step and attempt
    coordinator     metadata.json
    coordinator     the event log up to here (so that no commit is ahead of its metrics)
    coordinator     COMMIT.json, create-only: the checkpoint exists from here on

A rank that dies anywhere before the last line leaves a folder that no reader looks at.
"""

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from headrace.commit import FileEntry
from headrace.digest import sha256_bytes
from headrace.errors import HeadraceError
from headrace.faults import fault_point
from headrace.local_store import complete_file
from headrace.patience import patiently
from headrace.storage import Storage
from training.checkpoint.format import (
    METADATA_NAME,
    Chunk,
    Item,
    aligned,
    data_file_name,
    encode_metadata,
    tensor_bytes,
)

_SLICE_BYTES = 8 << 20
"""Bytes hashed and written at once: large enough to be fast, small enough to let the training thread in between."""


class NotFinite(HeadraceError):
    """The state holds a value that is no number or infinite: it is not saved."""


@dataclass(frozen=True)
class StoredChunk:
    """What a rank tells the coordinator about one chunk it wrote."""

    chunk: Chunk
    file: FileEntry
    """The whole file that holds it."""


class CheckpointWriter(StorageWriter):
    """Writes the checkpoint of one step; used for one save. Raises what the storage raises."""

    def __init__(
        self,
        storage: Storage,
        prefix: str,
        *,
        step: int,
        rank: int,
        staging_dir: Path,
        put_file: Callable[[Path, str], None],
        commit: Callable[[dict[str, FileEntry]], None],
        until: float,
    ) -> None:
        """`prefix` is the checkpoint's folder, fresh. `commit` runs on the coordinator after all files are stored.

        `put_file` copies a staged file to a key when the storage is no folder. A store that is away is waited for until
        time.monotonic() is `until`.
        """
        self._storage = storage
        self._prefix = prefix
        self._step = step
        self._rank = rank
        self._staging_dir = staging_dir
        self._put_file = put_file
        self._commit = commit
        self._until = until

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing to forget: one writer writes once."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """The folder needs no preparation; each file makes it when it is written."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Refuse what is not a tensor before anything is written."""
        for item in plan.items:
            if item.type is WriteItemType.BYTE_IO:
                raise TypeError(f"{item.index.fqn} is not a tensor; checkpoints hold tensors and JSON only")
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Each rank writes its own part; which, is decided by the planner."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's data file; called on every rank."""
        written: Future[list[WriteResult]] = Future()
        written.set_result(self._write_file(plan.items, planner) if plan.items else [])
        fault_point("save.files_written", step=self._step, rank=self._rank)
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write metadata.json and commit; called on the coordinator when every rank's file is stored."""
        stored = [result for results_of_rank in results for result in results_of_rank]
        files = {result.storage_data.chunk.file: result.storage_data.file for result in stored}
        data = encode_metadata(_items(metadata, stored))
        patiently(lambda: self._storage.write_bytes(f"{self._prefix}/{METADATA_NAME}", data), self._until)
        files[METADATA_NAME] = FileEntry(size=len(data), sha256=sha256_bytes(data))
        self._commit(files)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:  # noqa: ARG003 - torch's interface
        """Never chosen by an address: this writer is always passed explicitly."""
        return False

    def _write_file(self, items: list[WriteItem], planner: SavePlanner) -> list[WriteResult]:
        name = data_file_name(self._rank)
        chunks: list[tuple[WriteItem, Chunk]] = []
        with self._complete_object(f"{self._prefix}/{name}", self._staging_dir / name) as file:
            output = _HashingFile(file)
            for item in items:
                tensor = planner.resolve_data(item)
                assert isinstance(tensor, Tensor)
                output.pad(aligned(output.position))
                chunks.append((item, _write_chunk(output, item, tensor, name)))
        entry = FileEntry(size=output.position, sha256=output.digest.hexdigest())
        return [WriteResult(item.index, chunk.length, StoredChunk(chunk, entry)) for item, chunk in chunks]

    @contextlib.contextmanager
    def _complete_object(self, key: str, staging: Path) -> Iterator[IO[bytes]]:
        """Open a file whose content becomes the object at the end of the block, or nothing does on an error.

        On a folder the file lies beside its target and is renamed: no second copy. Elsewhere it is staged and uploaded.
        """
        target = self._storage.local_path(key)
        if target is not None:
            fault_point("storage.write", key=key)
            with complete_file(target, "write") as file:
                yield file
            return
        try:
            with complete_file(staging, "stage") as file:
                yield file
            self._put_file(staging, key)
        finally:
            staging.unlink(missing_ok=True)


class _HashingFile:
    """A file that knows its position and the digest of everything written to it."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.position = 0
        self.digest = hashlib.sha256()

    def write(self, data: memoryview | bytes) -> None:
        self._file.write(data)
        self.digest.update(data)
        self.position += len(data)

    def pad(self, position: int) -> None:
        self.write(bytes(position - self.position))


def _write_chunk(output: _HashingFile, item: WriteItem, tensor: Tensor, file: str) -> Chunk:
    assert item.tensor_data is not None
    assert item.tensor_data.chunk is not None
    sizes = item.tensor_data.chunk.sizes
    assert tensor.shape == sizes, f"{item.index.fqn}: planned {sizes}, staged {tensor.shape}"
    _require_finite(item.index.fqn, tensor)
    start = output.position
    data = tensor_bytes(tensor)
    digest = hashlib.sha256()
    for position in range(0, len(data), _SLICE_BYTES):
        part = data[position : position + _SLICE_BYTES]
        output.write(part)
        digest.update(part)
    return Chunk(
        offsets=tuple(item.tensor_data.chunk.offsets),
        sizes=tuple(sizes),
        file=file,
        start=start,
        length=len(data),
        sha256=digest.hexdigest(),
    )


def _require_finite(name: str, tensor: Tensor) -> None:
    """Nothing may ever be resumed from a state that is not finite. Raises NotFinite."""
    if tensor.is_floating_point() and tensor.numel():
        least, greatest = torch.aminmax(tensor)  # one pass; both are NaN when any value is
        if not (torch.isfinite(least) and torch.isfinite(greatest)):
            raise NotFinite(f"{name} holds values that are not finite ({float(least)} to {float(greatest)}).")


def _items(metadata: Metadata, stored: list[WriteResult]) -> dict[str, Item]:
    """Every planned tensor with the chunks that were written for it, in the planned order."""
    chunks: dict[str, list[Chunk]] = {name: [] for name in metadata.state_dict_metadata}
    for result in stored:
        chunks[result.index.fqn].append(result.storage_data.chunk)
    items = {}
    for name, described in metadata.state_dict_metadata.items():
        assert isinstance(described, TensorStorageMetadata)
        in_order = sorted(chunks[name], key=lambda chunk: chunk.offsets)
        items[name] = Item(described.properties.dtype, tuple(described.size), tuple(in_order))
    return items
