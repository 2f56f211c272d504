"""Plain requests to the servers that `headrace up` starts: their clients take seconds to load."""

import base64
import json
import os
import urllib.error
import urllib.request
from typing import Any

from headrace.errors import Retryable

SECONDS = 5.0


class NoAnswer(Retryable):
    """A server did not answer, or not as it should."""


def answers(url: str, seconds: float = SECONDS) -> bool:
    """Whether a request of this address is answered with success."""
    try:
        with urllib.request.urlopen(_request(url), timeout=seconds) as answer:
            return bool(200 <= answer.status < 300)
    except (urllib.error.URLError, OSError):
        return False


def ask(url: str, body: dict[str, Any] | None = None, seconds: float = SECONDS) -> Any:
    """The JSON document at this address, asked for with a JSON body when there is one. Raises NoAnswer."""
    try:
        with urllib.request.urlopen(_request(url, body), timeout=seconds) as answer:
            return json.load(answer)
    except (urllib.error.URLError, OSError, ValueError) as error:
        raise NoAnswer(f"{url} did not answer as expected: {error}") from error


def _request(url: str, body: dict[str, Any] | None = None) -> urllib.request.Request:
    data = None if body is None else json.dumps(body).encode("utf-8")
    request = urllib.request.Request(url, data=data, headers={"Content-Type": "application/json"})
    login = os.environ.get("PREFECT_API_AUTH_STRING") or os.environ.get("PREFECT_SERVER_API_AUTH_STRING")
    if login:
        encoded = base64.b64encode(login.encode("utf-8")).decode("ascii")
        request.add_unredirected_header("Authorization", f"Basic {encoded}")
    return request
