"""Everything that survives a restart, as one type; and what the loop asks of whoever saves it.

A checkpoint takes all of a `TrainState` or nothing: weights, optimizer moments, counters, the position in the sample
order, the schedule and the random state of every rank. Tensors go by FQN and keep their names under every layout;
what is not a tensor is one JSON object. There is no pickle.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from headrace.errors import DamagedData
from training.optim.schedule import Schedule
from training.rng import capture_random_state, restore_random_state
from training.run_spec import RestorePoint

MOMENTS = ("exp_avg", "exp_avg_sq", "step")
"""AdamW's state of one parameter, in the names that checkpoints use."""


@dataclass
class TrainState:
    """The training state of one rank."""

    parameters: Mapping[str, nn.Parameter]
    """The master weights by FQN: this rank's shards (DTensors) under FSDP."""
    optimizer: Optimizer
    schedule: Schedule
    rank: int
    step: int = 0
    """Completed optimizer updates."""
    tokens_seen: int = 0
    """Tokens with a loss, over all ranks and steps."""
    position: int = 0
    """Where the next batch starts in the sample order: sequences taken, and those passed over."""
    skipped: list[tuple[int, int]] = field(default_factory=list)
    """Ranges of the sample order that were passed over, as (start, stop), in this order."""
    recent_losses: list[float] = field(default_factory=list)
    """Losses of the last steps, as far as anybody judges by them."""

    def advance(self, *, sequences: int, tokens: int) -> None:
        """Count one completed step that took `sequences` samples holding `tokens` valid tokens, over all ranks."""
        self.step += 1
        self.position += sequences
        self.tokens_seen += tokens

    def pass_over(self, stop: int) -> None:
        """Go on at `stop` in the sample order, without a step."""
        self.skipped.append((self.position, stop))
        self.position = stop

    @property
    def random_state_name(self) -> str:
        """Checkpoint name of this rank's random state."""
        return f"rng.rank{self.rank:04d}"

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor of the state by checkpoint name: live references, so stage a copy before the next step.

        `model.<fqn>`, `optim.<fqn>.exp_avg|exp_avg_sq|step`, and `rng.rankNNNN` (uint8) of this rank. A reader fills
        these tensors in place. Only `rng.*` may be missing in a checkpoint (it was written by fewer ranks): then this
        rank keeps the state it has, which is a function of the seed and the rank.
        """
        tensors = {f"model.{fqn}": parameter.detach() for fqn, parameter in self.parameters.items()}
        for fqn, parameter in self.parameters.items():
            moments = self.optimizer.state[parameter]
            tensors |= {f"optim.{fqn}.{name}": moments[name] for name in MOMENTS}
        tensors[self.random_state_name] = capture_random_state()
        return tensors

    def values(self) -> dict[str, Any]:
        """The rest of the state, as one JSON object."""
        return {
            "step": self.step,
            "tokens_seen": self.tokens_seen,
            "position": self.position,
            "skipped": [list(passed) for passed in self.skipped],
            "recent_losses": list(self.recent_losses),
            "schedule": self.schedule.values(),
        }

    def state_dict(self) -> dict[str, Any]:
        """`tensors()` and `values()` under these two keys."""
        return {"tensors": self.tensors(), "values": self.values()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over `tensors` (by the names of `tensors()`; a reader may have filled those in place) and `values`.

        Raises DamagedData when the values are not those of this run (another schedule).
        """
        values = state["values"]
        if values["schedule"] != self.schedule.values():
            raise DamagedData(
                f"The checkpoint of step {values['step']} follows the learning-rate schedule {values['schedule']}, "
                f"but this run follows {self.schedule.values()}."
            )
        own = self.tensors()
        for name, tensor in state["tensors"].items():
            if name in own:
                own[name].copy_(tensor)
        self.step = int(values["step"])
        self.tokens_seen = int(values["tokens_seen"])
        self.position = int(values["position"])
        # Checkpoints from before there was a way to pass over anything do not have these.
        self.skipped = [(int(start), int(stop)) for start, stop in values.get("skipped", [])]
        self.recent_losses = [float(loss) for loss in values.get("recent_losses", [])]
        random_state = state["tensors"].get(self.random_state_name)
        if random_state is not None:
            restore_random_state(random_state)


class Checkpointer(Protocol):
    """Saves a TrainState without stopping the training, and reads a committed one back.

    Every rank makes the same calls in the same order. At most one save is in flight. The checkpointer itself tells what
    becomes of a save (`save.begun`, `save.committed`, `save.skipped`, `save.failed`); only too many failed saves in a
    row raise.
    """

    def save_async(self, state: TrainState, *, required: bool = False) -> bool:
        """Copy the state as it is now and start to write it; returns as soon as the copy is made.

        False when the save was skipped, because the one before is still being written: a slow store costs checkpoints,
        never steps. A `required` save (the last step, a stop) waits for that one instead.
        """

    def poll(self) -> int | None:
        """The step of a save that was committed since the last call, or None. Never waits."""

    def wait(self) -> int | None:
        """Finish the save in flight and return its step as `poll` does; None when there was none to report."""

    def load(self, state: TrainState, restore: RestorePoint) -> None:
        """Fill `state` from a committed checkpoint of this run; raises when it does not verify."""
