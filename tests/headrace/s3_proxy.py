"""A proxy in front of an S3 server that fails on request, and the environment that leads to an endpoint."""

import contextlib
import http.client
import http.server
import os
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

BUCKET = "headrace-tests"
DROP = "drop"


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def use_endpoint(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "tests")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not-a-secret")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/dev/null")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


@dataclass
class Answer:
    """What the client gets instead of the server's answer."""

    status: int
    body: bytes = b""


@dataclass
class Proxy:
    """Hands requests on to the S3 server; `before` and `after` may put another answer in place, or drop the line.

    `before(method, path)` runs before the server sees the request, `after(method, path, status)` once it has answered.
    Returning None lets things take their course; DROP closes the connection without an answer.
    """

    endpoint: str
    before: Callable[[str, str], "Answer | str | None"] = lambda method, path: None
    after: Callable[[str, str, int], "Answer | str | None"] = lambda method, path, status: None
    strip_condition: bool = False
    requests: list[tuple[str, str]] = field(default_factory=list)


class _Server(http.server.ThreadingHTTPServer):
    def handle_error(self, *_: object) -> None:
        """Say nothing about clients that gave up waiting: that is what they are tested for."""


@contextlib.contextmanager
def run_proxy(upstream: str) -> Iterator[Proxy]:
    """Run a proxy to the server at `upstream` ("host:port")."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _serve(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            settings.requests.append((self.command, self.path))
            answer = settings.before(self.command, self.path)
            if answer is not None:
                self._reply(answer, {})
                return
            headers = {name: value for name, value in self.headers.items() if name.lower() != "expect"}
            if settings.strip_condition:
                headers = {name: value for name, value in headers.items() if name.lower() != "if-none-match"}
            connection = http.client.HTTPConnection(upstream, timeout=60)
            with contextlib.closing(connection):
                connection.request(self.command, self.path, body=body, headers=headers)
                response = connection.getresponse()
                content = response.read()
            replaced = settings.after(self.command, self.path, response.status)
            self._reply(replaced or Answer(response.status, content), dict(response.getheaders()))

        def _reply(self, answer: "Answer | str", headers: dict[str, str]) -> None:
            self.close_connection = True
            if not isinstance(answer, Answer):
                self.connection.shutdown(socket.SHUT_RDWR)
                return
            sizes = [value for name, value in headers.items() if name.lower() == "content-length"]
            self.send_response(answer.status)
            for name, value in headers.items():
                if name.lower() not in ("content-length", "connection", "date", "server", "transfer-encoding"):
                    self.send_header(name, value)
            length = sizes[0] if self.command == "HEAD" and sizes else None
            self.send_header("Content-Length", length or str(len(answer.body)))
            self.send_header("Connection", "close")
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(answer.body)

        do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = _serve

        def log_message(self, *_: object) -> None:
            """Keep the tests' output clean."""

    server = _Server(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    settings = Proxy(endpoint=f"http://127.0.0.1:{server.server_address[1]}")
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield settings
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
