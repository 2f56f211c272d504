"""Where the tasks of this process show their progress."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from headrace.terminal import Terminal

_terminal: ContextVar[Terminal | None] = ContextVar("terminal", default=None)


def terminal() -> Terminal:
    """The terminal of the command that runs the flow; lines on stderr when a worker runs it."""
    return _terminal.get() or Terminal(plain=True)


@contextmanager
def showing_on(shown: Terminal) -> Iterator[None]:
    """Use this terminal for all tasks that run within the block."""
    token = _terminal.set(shown)
    try:
        yield
    finally:
        _terminal.reset(token)
