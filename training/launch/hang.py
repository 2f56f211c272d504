"""When a silent rank counts as hanging.

Every rank renews its heartbeat file with each phase of each step. Its age is measured with the agent's own clock, from
the moment the agent saw the content change: a clock that jumps cannot fake a hang or hide one.
"""

import json
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

EXEMPT_STEPS = 5
"""First steps of an attempt: compilation, caches and first contacts make them many times slower than the others."""

FIRST_FACTOR = 5.0
"""How much longer than the configured time those may be silent."""

LEARNED_FACTOR = 5.0
"""Silence of this many usual step times is a hang, when that is longer than the configured time."""

_SLOW_PHASES = ("start", "evaluate")
_SAVING_PHASES = ("save", "commit")
_REMEMBERED_STEPS = 20


@dataclass(frozen=True)
class Beat:
    """What a rank last said of itself."""

    rank: int
    pid: int
    step: int
    phase: str


@dataclass(frozen=True)
class Hang:
    """The verdict: which rank has been silent for how long, and how much was allowed."""

    rank: int
    beat: Beat | None
    """None when the rank never said anything."""
    silent_seconds: float
    allowed_seconds: float

    def describe(self) -> str:
        """One sentence for people."""
        where = f"in phase {self.beat.phase!r} after step {self.beat.step}" if self.beat else "before its first sign"
        return (
            f"Rank {self.rank} hangs {where}: silent for {self.silent_seconds:.0f} s, where "
            f"{self.allowed_seconds:.0f} s are allowed (launch.hang_timeout_seconds)."
        )


@dataclass
class _Watched:
    beat: Beat | None = None
    changed: float = 0.0
    step_changed: float | None = None
    content: bytes = b""
    step_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_REMEMBERED_STEPS))


class HangDetector:
    """Follows the heartbeats of the ranks on this machine."""

    def __init__(
        self,
        heartbeats: Mapping[int, Path],
        *,
        start_step: int,
        hang_timeout_seconds: float,
        save_timeout_seconds: float,
        now: float,
    ) -> None:
        """`heartbeats` are the files by rank; `start_step` is the step that the attempt goes on from.

        `now`, as everywhere here, is a monotonic time in seconds.
        """
        self._files = dict(heartbeats)
        self._start_step = start_step
        self._hang_seconds = hang_timeout_seconds
        self._save_seconds = save_timeout_seconds
        self._ranks = {rank: _Watched(changed=now) for rank in heartbeats}

    def look(self, now: float) -> Hang | None:
        """Read the heartbeats; return the verdict on the rank that went silent first, or None."""
        for rank, watched in self._ranks.items():
            self._update(rank, watched, now)
        hangs = [hang for rank, watched in self._ranks.items() if (hang := self._judge(rank, watched, now))]
        return max(hangs, key=lambda hang: hang.silent_seconds, default=None)

    def beats(self) -> dict[int, Beat]:
        """The last sign of every rank that gave one."""
        return {rank: watched.beat for rank, watched in self._ranks.items() if watched.beat}

    def _update(self, rank: int, watched: _Watched, now: float) -> None:
        try:
            content = self._files[rank].read_bytes()
        except FileNotFoundError:
            return
        if content == watched.content:
            return
        document: dict[str, Any] = json.loads(content)
        beat = Beat(rank, int(document["pid"]), int(document["step"]), str(document["phase"]))
        if watched.beat is not None and beat.step > watched.beat.step:
            if watched.step_changed is not None:
                watched.step_seconds.append((now - watched.step_changed) / (beat.step - watched.beat.step))
            watched.step_changed = now
        watched.beat, watched.content, watched.changed = beat, content, now

    def _judge(self, rank: int, watched: _Watched, now: float) -> Hang | None:
        silent = now - watched.changed
        allowed = self._allowed(watched)
        return Hang(rank, watched.beat, silent, allowed) if silent > allowed else None

    def _allowed(self, watched: _Watched) -> float:
        beat = watched.beat
        usual = statistics.median(watched.step_seconds) if watched.step_seconds else 0.0
        allowed = max(self._hang_seconds, LEARNED_FACTOR * usual)
        if beat is not None and beat.phase in _SAVING_PHASES:
            return allowed + self._save_seconds
        if beat is None or beat.phase in _SLOW_PHASES or beat.step - self._start_step < EXEMPT_STEPS:
            return FIRST_FACTOR * allowed
        return allowed
