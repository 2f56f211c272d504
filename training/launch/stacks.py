"""What every rank was doing when one of them was found hanging.

Each rank registers a handler in C, so its stack is written also while a thread holds the interpreter lock. Ranks that
wait for each other wait in the same place: the one in another place is the suspect (as ByteRobust does it, 2025, and
BigScience did by hand with py-spy).
"""

import faulthandler
import itertools
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from training.run_spec import AttemptSpec

SIGNAL = signal.SIGUSR1
COLLECTIVES = ("distributed_c10d.py", "_functional_collectives.py")
"""Modules of torch.distributed in which a rank waits for others."""

WAIT_SECONDS = 2.0
"""How long a rank may take to write its stack; one that is stopped by a signal never does."""

_THREAD = re.compile(r"^(?:Current thread|Thread) 0x[0-9a-f]+")
_FRAME = re.compile(r'^  File "(?P<file>[^"]+)", line (?P<line>\d+|\?\?\?) in (?P<function>.+)$')

_open: list[IO[str]] = []
"""Files that handlers of this process write to: they must stay open."""


@dataclass(frozen=True)
class Frame:
    """One call on a stack."""

    file: str
    line: str
    function: str

    @property
    def place(self) -> str:
        """Where it is, whatever the line: ranks that wait together may wait at different turns of one loop."""
        return f"{Path(self.file).name}:{self.function}"

    def __str__(self) -> str:
        """For people."""
        return f"{self.function} ({self.file}:{self.line})"


def stack_path(spec: AttemptSpec, rank: int) -> Path:
    """Where a rank writes its stacks."""
    return spec.work_path / "stacks" / f"rank-{rank}.txt"


def offer_stacks(spec: AttemptSpec, rank: int) -> None:
    """In a rank: write the stacks of all threads whenever the agent asks for them."""
    path = stack_path(spec, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("a", encoding="utf-8")
    _open.append(file)
    faulthandler.register(SIGNAL, file=file, all_threads=True)


def collect_stacks(spec: AttemptSpec, pids: Mapping[int, int]) -> dict[int, str]:
    """In the agent: ask the ranks (process ids by rank) for their stacks; the text of each that answered in time."""
    sizes = {rank: _size(stack_path(spec, rank)) for rank in pids}
    asked = [rank for rank, pid in pids.items() if sizes[rank] is not None and _ask(pid)]
    deadline = time.monotonic() + WAIT_SECONDS
    texts: dict[int, str] = {}
    while time.monotonic() < deadline:
        latest = {rank: _read(stack_path(spec, rank), sizes[rank] or 0) for rank in asked}
        if latest == texts and all(latest.values()):
            break  # all have answered, and nothing was added since the last look
        texts = latest
        time.sleep(0.1)
    return {rank: text for rank, text in texts.items() if text}


def main_thread(text: str) -> list[Frame]:
    """The calls of the thread that runs the rank, innermost first; empty when the text has none."""
    threads: list[list[Frame]] = []
    for line in text.splitlines():
        if _THREAD.match(line):
            threads.append([])
        elif threads and (match := _FRAME.match(line)):
            threads[-1].append(Frame(match["file"], match["line"], match["function"]))
    # Every other thread of Python begins there.
    main = [thread for thread in threads if thread and thread[-1].function != "_bootstrap"]
    return (main or threads or [[]])[0]


def _waits(frames: list[Frame]) -> bool:
    """Whether the innermost calls, up to the first that is not torch's, are those of a collective."""
    inner = itertools.takewhile(lambda frame: "/torch/" in frame.file, frames)
    return any(Path(frame.file).name in COLLECTIVES for frame in inner)


def tell_stacks(texts: Mapping[int, str], silent: int) -> str:
    """Where the ranks are, in a sentence or two; `silent` is the one that was found hanging."""
    stacks = {rank: frames for rank, text in sorted(texts.items()) if (frames := main_thread(text))}
    if silent not in stacks:
        mute = f"Rank {silent} does not answer: it is stopped, or stuck in the kernel."
        if not stacks:
            return mute
        first = min(stacks)
        return f"{mute} {_ranks(list(stacks)).capitalize()} in {stacks[first][0]}."
    places = {rank: tuple(frame.place for frame in frames) for rank, frames in stacks.items()}
    sizes = Counter(places.values())
    # One that waits for nobody before those that do; then of the smallest group; the silent one before others.
    suspect = min(stacks, key=lambda r: (_waits(stacks[r]), sizes[places[r]], r != silent, r))
    where = f"Rank {suspect} is in {stacks[suspect][0]}"
    others = [rank for rank in stacks if places[rank] != places[suspect]]
    return (
        f"{where}; {_ranks(others)} in {stacks[others[0]][0]}." if others else f"{where}, as every rank that answered."
    )


def _ranks(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} is"
    return f"{len(ranks)} other ranks, rank {ranks[0]} among them, are"


def _ask(pid: int) -> bool:
    try:
        os.kill(pid, SIGNAL)
    except ProcessLookupError:
        return False
    return True


def _size(path: Path) -> int | None:
    """None when the rank has not offered its stacks: the signal would end it."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None


def _read(path: Path, start: int) -> str:
    with path.open("rb") as file:
        file.seek(start)
        return file.read().decode("utf-8", errors="replace")
