"""`init_from`: the weights that a run starts from when they are not drawn from its seed.

Weights alone: the optimizer, the schedule, the counters and the sample order begin anew, and the origin is recorded.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from headrace.errors import ConfigError
from headrace.storage import Storage
from training.checkpoint.catalog import newest_at
from training.checkpoint.reader import read_tensors
from training.export.hf import load_hf_dir, parameter_shapes
from training.model.config import ModelConfig

_PREFIX = "model."


@dataclass(frozen=True)
class Origin:
    """Whole tensors by FQN, and where they come from."""

    weights: dict[str, Tensor]
    record: dict[str, Any]
    """What is noted of the source: enough to find it again and to see that it has not changed."""


def read_origin(storage: Storage, init_from: str, model: ModelConfig) -> Origin:
    """Read `run:ID@STEP` (a committed checkpoint on the same store) or `hf://FOLDER`.

    Raises InputError when there is no such source, DamagedData when it does not verify, and ConfigError naming every
    tensor that does not fit into `model`.
    """
    if init_from.startswith("hf://"):
        folder = Path(init_from.removeprefix("hf://")).expanduser()
        _, weights = load_hf_dir(folder)
        origin = Origin(weights, {"folder": str(folder.absolute())})
    else:
        origin = _from_run(storage, init_from)
    _require_fit(model, origin.weights, init_from)
    return origin


def _from_run(storage: Storage, init_from: str) -> Origin:
    match = re.fullmatch(r"run:([0-9a-f]{32})@(\d+)", init_from)
    if match is None:
        raise ConfigError(f"training.init_from must be run:ID@STEP or hf://FOLDER, got {init_from!r}.")
    run_id, step = match[1], int(match[2])
    checkpoint = newest_at(storage, f"runs/{run_id}/artifacts", step)
    stored = read_tensors(storage, checkpoint.prefix, checkpoint.commit, wanted=lambda name: name.startswith(_PREFIX))
    return Origin(
        {name.removeprefix(_PREFIX): tensor for name, tensor in stored.items()},
        {
            "run_id": run_id,
            "checkpoint_step": step,
            "checkpoint_attempt": checkpoint.attempt,
            "checkpoint_digest": checkpoint.commit.digest,
        },
    )


def _require_fit(model: ModelConfig, weights: dict[str, Tensor], init_from: str) -> None:
    wanted = parameter_shapes(model)
    problems = [f"{name} is missing there" for name in wanted if name not in weights]
    problems += [f"{name} exists only there" for name in weights if name not in wanted]
    problems += [
        f"{name} has shape {list(weights[name].shape)} there and {list(shape)} here"
        for name, shape in wanted.items()
        if name in weights and tuple(weights[name].shape) != shape
    ]
    if problems:
        more = f"; and {len(problems) - 4} more" if len(problems) > 4 else ""
        raise ConfigError(
            f"training.init_from {init_from} holds another model than the section `model` describes: "
            f"{'; '.join(problems[:4])}{more}. Give the section `model` of that run."
        )
