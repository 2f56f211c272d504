"""Where a rank says what happens: events (rank 0 alone) and a heartbeat (every rank)."""

import json
import os
import time
from pathlib import Path
from typing import Any

from headrace.events import EventWriter


class Sink:
    """Events of the attempt and this rank's heartbeat; either may be missing."""

    def __init__(self, *, rank: int = 0, heartbeat: Path | None = None, events: EventWriter | None = None) -> None:
        self._rank = rank
        self._heartbeat = heartbeat
        self.events = events
        self.step = 0
        """Completed optimizer steps, as last told."""
        if heartbeat is not None:
            heartbeat.parent.mkdir(parents=True, exist_ok=True)

    def event(self, kind: str, **fields: Any) -> None:
        """Append one event, on the rank that writes them."""
        if self.events is not None:
            self.events.append(kind, **fields)

    def phase(self, name: str, *, step: int | None = None) -> None:
        """Say that this rank is alive and what it begins: `step` counts completed optimizer steps."""
        if step is not None:
            self.step = step
        if self._heartbeat is None:
            return
        beat = {"rank": self._rank, "pid": os.getpid(), "step": self.step, "phase": name, "time": time.time()}
        # Renamed into place: the watcher never reads half a line. No fsync: a heartbeat is for processes, not crashes.
        temporary = self._heartbeat.with_suffix(".tmp")
        temporary.write_text(json.dumps(beat), encoding="utf-8")
        temporary.replace(self._heartbeat)
