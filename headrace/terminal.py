"""What people see: live progress, one line for what happened, one table at the end. All of it on stderr.

On a terminal each open stage has a live bar. Elsewhere (a log file, CI) it writes lines: one at the start, at most one
in five seconds, one at the end. Standard output belongs to results: `emit_json` writes exactly one document there.
Credentials are masked in everything that is written here.
"""

import contextlib
import json
import logging
import math
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TextIO

from rich.cells import cell_len
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.text import Text

from headrace.errors import Cancelled, Preempted

LINE_INTERVAL_SECONDS = 5.0
_BAR_INTERVAL_SECONDS = 0.1
_ETA_INTERVALS = 2
"""One step may be the slow first one; a time left is told from this many counts after the first on."""

_ABBREVIATIONS = {
    "bytes_per_second": "B/s",
    "documents_per_second": "docs/s",
    "learning_rate": "lr",
    "tokens_per_second": "tok/s",
}
_SECRET_VARIABLE = re.compile(
    r"(?:^|_)(?:SECRET|TOKEN|PASSWORD|PASSWD|API_KEY|ACCESS_KEY|AUTH_STRING)(?:_|$)(?!.*(?:FILE|PATH|DIR)$)"
)
_SECRET_FIELD = re.compile(r"secret|password|passwd|api_?key|access_?key|auth_?token|auth_?string", re.IGNORECASE)
_SECRET_MIN_LENGTH = 8
_URL_CREDENTIALS = re.compile(r"(?<=://)[^\s/@]+(?=@)")
_ASSIGNMENT = re.compile(
    r"(?P<name>[\w.-]*(?:secret|password|passwd|api_?key|access_?key|auth_?token)[\w.-]*[\"']?\s*[=:]\s*[\"']?)"
    r"[^\s\"',;&}]+",
    re.IGNORECASE,
)
_MASK = "***"


class StageProgress:
    """The progress of one stage; made by `Terminal.stage`. Safe to use from threads."""

    def __init__(self, terminal: "Terminal", name: str, total: int | None, unit: str) -> None:
        self.name = name
        self._terminal = terminal
        self._unit = unit
        self._total = total
        self._done: int | None = None
        self._fields: dict[str, Any] = {}
        self._outcome = ""
        self._started = terminal._clock()
        self._base: int | None = None
        self._rate_from: tuple[float, int] | None = None
        self._intervals = 0
        self._last_line = self._started
        self._last_bar = -math.inf
        self._task: TaskID | None = None

    def update(self, done: int | None = None, *, total: int | None = None, **fields: Any) -> None:
        """Show `done` of `total` units and further fields (`loss=2.31`); a field keeps its value until replaced."""
        with self._terminal._lock:
            if total is not None:
                self._total = total
            if done is not None:
                self._count(done)
            self._fields.update(fields)
            self._terminal._show(self)

    def conclude(self, text: str) -> None:
        """Set what the last line of the stage says, for example "reused"."""
        with self._terminal._lock:
            self._outcome = text

    def note(self, text: str) -> None:
        """Write one line about this stage now."""
        self._terminal.note(f"{self.name}: {text}")

    def describe(self) -> str:
        """Return the state in one line: `step 120/256  46%  loss=2.31  tok/s=12,345`."""
        parts = []
        if self._done is not None:
            parts.append(f"{self._unit} {self._amount()}".strip())
        if self._done is not None and self._total:
            parts.append(f"{100 * self._done // self._total}%")
        parts.extend(f"{_ABBREVIATIONS.get(name, name)}={_format(value)}" for name, value in self._fields.items())
        return "  ".join(parts)

    def describe_with_eta(self) -> str:
        """Return `describe()` and the time left, where it can be known."""
        remaining = self._remaining_seconds()
        return self.describe() + (f"  ETA {_duration(remaining)}" if remaining is not None else "")

    def _count(self, done: int) -> None:
        """Take the speed from the first unit on that was seen to be counted.

        What was done before, by an earlier attempt or one that a restart lost, says nothing about it, and the way to
        the first unit is start-up.
        """
        if self._base is None or (self._done is not None and done < self._done):
            self._base, self._rate_from, self._intervals = done, None, 0
        elif done > self._base and self._rate_from is None:
            self._rate_from = (self._terminal._clock(), done)
        elif self._done is not None and done > self._done:
            self._intervals += 1
        self._done = done

    def _amount(self) -> str:
        return f"{self._done:,}/{self._total:,}" if self._total else f"{self._done:,}"

    def _remaining_seconds(self) -> float | None:
        if self._rate_from is None or self._done is None or not self._total or self._intervals < _ETA_INTERVALS:
            return None
        seconds = self._terminal._clock() - self._rate_from[0]
        units = self._done - self._rate_from[1]
        left = self._total - self._done
        return seconds / units * left if left > 0 else None


class Terminal:
    """Writes progress, notes, the summary and errors to stderr."""

    def __init__(
        self,
        json: bool = False,
        plain: bool | None = None,
        *,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Write lines when `plain`, live bars otherwise; None decides by whether stderr is a terminal.

        With `json` the summary is left to the document on standard output. `stream` and `clock` (seconds) are for
        tests.
        """
        self.json = json
        self._console = Console(file=stream, stderr=stream is None, highlight=False, markup=False, emoji=False)
        self.plain = plain if plain is not None else not self._console.is_terminal or self._console.is_dumb_terminal
        self._clock = clock
        self._lock = threading.RLock()
        self._progress: Progress | None = None
        self._open_stages = 0

    @contextlib.contextmanager
    def stage(self, name: str, total: int | None = None, unit: str = "") -> Iterator[StageProgress]:
        """Show a stage while the block runs; at the end say how it went and how long it took.

        `total` counts units, None when it is not known; `unit` names them ("step", "documents").
        """
        progress = StageProgress(self, name, total, unit)
        self._open(progress)
        how = "done in"
        try:
            yield progress
        except (KeyboardInterrupt, Cancelled, Preempted):
            how = "stopped after"
            raise
        except BaseException as error:
            # Prefect ends a flow by an exception of its own that is no Exception either.
            how = "failed after" if isinstance(error, Exception) else "stopped after"
            raise
        finally:
            self._close(progress, how)

    @contextlib.contextmanager
    def waiting(self, text: str) -> Iterator[None]:
        """While the block runs, say on a terminal what it waits for; nothing of it stays."""
        if self.plain:
            yield
            return
        with self._console.status(Text(redact(text))):
            yield

    def note(self, text: str) -> None:
        """Write one line now."""
        self._write(text)

    def error(self, text: str) -> None:
        """Write what went wrong, in red where there is colour."""
        self._write(f"Error: {text}", style="bold red")

    def summary(self, title: str, rows: Iterable[Sequence[Any]]) -> None:
        """Write a table: a title, then rows of cells in aligned columns; cells that are numbers are right-aligned."""
        if self.json:
            return
        with self._lock:
            self._write("")
            self._write(title, style="bold")
            for line in _align([list(row) for row in rows]):
                self._write(f"  {line}".rstrip())

    def emit_json(self, document: Any) -> None:
        """Write one JSON document to standard output, as the function of the same name does."""
        emit_json(document)

    def log_handler(self) -> logging.Handler:
        """Return a handler that writes log records here: above the live bars, with credentials masked."""
        return _LogHandler(self)

    def _write(self, text: str, style: str | None = None) -> None:
        text = redact(text)
        with self._lock, contextlib.suppress(BrokenPipeError):
            if self.plain:
                self._console.file.write(text + "\n")
                self._console.file.flush()
            else:
                self._console.print(Text(text, style=style or ""), soft_wrap=True)

    def _open(self, stage: StageProgress) -> None:
        with self._lock:
            if self.plain:
                self._write(f"{stage.name}: started")
                return
            if self._progress is None:
                self._progress = Progress(
                    TextColumn("{task.description}", style="bold"),
                    BarColumn(bar_width=24),
                    TextColumn("{task.fields[state]}"),
                    console=self._console,
                    transient=True,
                    redirect_stdout=False,
                )
                self._progress.start()
            self._open_stages += 1
            stage._task = self._progress.add_task(stage.name, total=stage._total, state="")

    def _show(self, stage: StageProgress) -> None:
        now = self._clock()
        if self._progress is not None and stage._task is not None:
            if now - stage._last_bar < _BAR_INTERVAL_SECONDS:
                return  # a stage may count thousands of documents a second
            stage._last_bar = now
            state = redact(stage.describe_with_eta())
            self._progress.update(stage._task, total=stage._total, completed=stage._done or 0, state=state)
        elif self.plain and now - stage._last_line >= LINE_INTERVAL_SECONDS:
            stage._last_line = now
            self._write(f"{stage.name}: {stage.describe_with_eta()}")

    def _close(self, stage: StageProgress, how: str) -> None:
        with self._lock:
            if self._progress is not None and stage._task is not None:
                self._progress.remove_task(stage._task)
                self._open_stages -= 1
                if self._open_stages == 0:
                    self._progress.stop()
                    self._progress = None
            state = stage._outcome or stage.describe()
            took = f"{how} {_duration(self._clock() - stage._started)}"
            self._write(f"{stage.name}: {took}" + (f"  {state}" if state else ""))


def emit_json(document: Any) -> None:
    """Write one JSON document to standard output, with credentials masked. Raises ValueError for NaN."""
    text = json.dumps(_redact_tree(document), indent=2, ensure_ascii=False, allow_nan=False)
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def redact(text: str) -> str:
    """Return the text with credentials masked: those in URLs, those that are assigned by name, and the values of this
    process's environment variables whose names say that they are secret.
    """
    for name, value in os.environ.items():
        if len(value) >= _SECRET_MIN_LENGTH and _SECRET_VARIABLE.search(name):
            text = text.replace(value, _MASK)
    text = _URL_CREDENTIALS.sub(_MASK, text)
    return _ASSIGNMENT.sub(lambda match: match["name"] + _MASK, text)


class _LogHandler(logging.Handler):
    def __init__(self, terminal: Terminal) -> None:
        super().__init__()
        self._terminal = terminal

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._terminal.note(self.format(record))
        except Exception:  # noqa: BLE001 - the contract of logging: a handler never raises into the caller
            self.handleError(record)


def _redact_tree(value: Any) -> Any:
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, dict):
        return {name: _MASK if _names_secret(name, item) else _redact_tree(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_redact_tree(item) for item in value]
    return value


def _names_secret(name: Any, value: Any) -> bool:
    if not isinstance(name, str) or not isinstance(value, str):
        return False
    return bool(_SECRET_FIELD.search(name) or _SECRET_VARIABLE.search(name))


def _format(value: Any) -> str:
    """Return a number as people read it: 12,345 and 2.31 and 0.0012; anything else as text."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.0f}" if 999.5 <= abs(value) < 1e15 else f"{value:.3g}"


def _duration(seconds: float) -> str:
    """Return 0.4 s, 12 s, 1:02 or 1:02:03."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    hours, minutes = whole // 3600, whole // 60 % 60
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"


def _align(rows: list[list[Any]]) -> list[str]:
    cells = [[(_format(cell), isinstance(cell, int | float)) for cell in row] for row in rows]
    columns = max((len(row) for row in cells), default=0)
    widths = [max(cell_len(row[i][0]) for row in cells if i < len(row)) for i in range(columns)]
    return [
        "  ".join(_pad(text, width, right) for (text, right), width in zip(row, widths, strict=False)) for row in cells
    ]


def _pad(text: str, width: int, right: bool) -> str:
    space = " " * (width - cell_len(text))
    return space + text if right else text + space
