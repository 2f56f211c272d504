"""An S3 server of our own, and a proxy in front of it that fails on request."""

import http.client
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.storage import Storage
from tests.headrace.s3_proxy import BUCKET, Proxy, free_port, run_proxy, use_endpoint

START_SECONDS = 60


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """The endpoint of a moto server in its own process, with one empty bucket."""
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + START_SECONDS
        while not _answers(port, f"/{BUCKET}"):
            assert process.poll() is None, "the S3 server ended at its start"
            assert time.monotonic() < deadline, "the S3 server did not start"
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def _answers(port: int, path: str) -> bool:
    """Create the bucket; moto takes an unsigned request."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("PUT", path, headers={"Host": "s3.amazonaws.com"})
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


@pytest.fixture
def s3_root(s3_server: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """An empty prefix in the bucket, with the environment that leads there."""
    use_endpoint(monkeypatch, s3_server)
    return f"s3://{BUCKET}/{secrets.token_hex(8)}"


@pytest.fixture(params=["file", "memory", "s3"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    """An empty storage of each kind."""
    if request.param == "file":
        return Storage.open(tmp_path / "root")
    if request.param == "memory":
        return Storage.open(f"memory://{secrets.token_hex(8)}")
    return Storage.open(request.getfixturevalue("s3_root"))


@pytest.fixture
def proxy(s3_server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """A failing way to the S3 server, and the environment that leads there."""
    with run_proxy(s3_server.removeprefix("http://")) as running:
        use_endpoint(monkeypatch, running.endpoint)
        yield running


@pytest.fixture
def proxied(proxy: Proxy) -> Storage:
    """An empty S3 storage behind the proxy."""
    return Storage.open(f"s3://{BUCKET}/{secrets.token_hex(8)}")
