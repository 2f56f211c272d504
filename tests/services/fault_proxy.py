"""Faults for the way to an S3 server: what a load balancer, a network or a busy server does."""

import contextlib
import threading
from collections.abc import Callable, Iterator

from tests.headrace.s3_proxy import DROP, Answer, Proxy

Before = Callable[[str, str], "Answer | str | None"]


def s3_error(status: int, code: str) -> Answer:
    """An error as S3 words it."""
    body = f"<?xml version='1.0' encoding='UTF-8'?><Error><Code>{code}</Code><Message>{code}!</Message></Error>"
    return Answer(status, body.encode())


def busy(share: float) -> Before:
    """Answers this share of all requests with 503 SlowDown."""
    return _some(share, s3_error(503, "SlowDown"))


def drops(share: float) -> Before:
    """Closes the connection of this share of all requests, without an answer."""
    return _some(share, DROP)


def _some(share: float, answer: Answer | str) -> Before:
    """Evenly spread, so that a test with many requests does not fail by chance."""
    lock = threading.Lock()
    owed = 0.0

    def before(method: str, path: str) -> Answer | str | None:
        nonlocal owed
        with lock:
            owed += share
            if owed < 1:
                return None
            owed -= 1
            return answer

    return before


@contextlib.contextmanager
def silent(proxy: Proxy) -> Iterator[None]:
    """A server that accepts every request and never answers during the block; what it holds is let go at the end."""
    over = threading.Event()

    def before(method: str, path: str) -> str:
        over.wait()
        return DROP

    earlier, proxy.before = proxy.before, before
    try:
        yield
    finally:
        proxy.before = earlier
        over.set()
