"""Compare two committed checkpoints, tensor by tensor.

    python -m training.checkpoint.compare spec.json

Each tensor is put together from its chunks, so two layouts compare; every byte is verified before it is used, and only
one tensor of each side is in memory. The last line on standard output is one JSON object: the result, or `error` and
`retryable`.
"""

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from headrace.storage import Storage
from training.checkpoint.catalog import Checkpoint, newest_at
from training.checkpoint.comparison import ComparisonSpec, Side, TensorDifference
from training.checkpoint.format import Item, dtype_name
from training.checkpoint.reader import read_metadata, read_tensor
from training.program import run_program, say

logger = logging.getLogger(__name__)


class _Opened:
    """One side with its checkpoint found and its index read."""

    def __init__(self, side: Side) -> None:
        self.storage = Storage.open(side.storage_root)
        self.checkpoint: Checkpoint = newest_at(self.storage, side.run_prefix, side.step)
        self.items: dict[str, Item] = read_metadata(self.storage, self.checkpoint.prefix, self.checkpoint.commit)

    def read(self, name: str) -> Tensor:
        return read_tensor(self.storage, self.checkpoint.prefix, name, self.items[name])


def compare(spec: ComparisonSpec, on_progress: Callable[[int, int], None]) -> dict[str, Any]:
    """The differences by name, and which two checkpoints these are.

    `on_progress` gets tensors done and tensors in all. Raises InputError when there is no such checkpoint, DamagedData
    when one does not verify.
    """
    first, second = _Opened(spec.first), _Opened(spec.second)
    names = sorted(first.items.keys() | second.items.keys())
    found = []
    for done, name in enumerate(names):
        on_progress(done, len(names))
        found.append(_compare(name, first, second))
    return {
        "equal": all(difference.status == "equal" for difference in found),
        "first": _described(spec.first, first),
        "second": _described(spec.second, second),
        "tensors": [difference.model_dump(mode="json") for difference in found],
    }


def _described(side: Side, opened: _Opened) -> dict[str, Any]:
    checkpoint = opened.checkpoint
    return {
        "run_id": side.run_id,
        "step": checkpoint.step,
        "attempt": checkpoint.attempt,
        "layout": checkpoint.commit.body.get("layout", {}),
        "digest": checkpoint.commit.digest,
    }


def _compare(name: str, first: _Opened, second: _Opened) -> TensorDifference:
    one, other = first.items.get(name), second.items.get(name)
    if one is None or other is None:
        status = "only in the first" if other is None else "only in the second"
        return TensorDifference(name=name, status=status)
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        detail = f"{_form(one)} and {_form(other)}"
        return TensorDifference(name=name, status="other shape", detail=detail)
    return difference_of(name, first.read(name), second.read(name))


def difference_of(name: str, one: Tensor, other: Tensor) -> TensorDifference:
    """Compare two tensors of one shape and type."""
    # In float64 every value of the smaller types is itself; of 64-bit integers only those up to 2^53, so `unequal`
    # is asked on the values as they are.
    a, b = (tensor.reshape(-1) for tensor in (one, other))
    both_nan = a.isnan() & b.isnan() if a.is_floating_point() else torch.zeros(a.shape, dtype=torch.bool)
    unequal = (a != b) & ~both_nan
    differing = int(unequal.sum())
    if not differing:
        return TensorDifference(name=name, status="equal", elements=a.numel())
    largest = float((a[unequal].to(torch.float64) - b[unequal].to(torch.float64)).abs().max())
    return TensorDifference(
        name=name,
        status="differs",
        elements=a.numel(),
        differing=differing,
        max_abs_difference=largest if largest < float("inf") else None,  # a NaN is not smaller either
    )


def _form(item: Item) -> str:
    return f"{dtype_name(item.dtype)}{list(item.shape)}"


def main() -> None:
    """Entry point."""
    run_program(
        ComparisonSpec,
        "a comparison",
        lambda spec: compare(spec, lambda done, total: say({"progress": done, "total": total})),
    )


if __name__ == "__main__":
    main()
