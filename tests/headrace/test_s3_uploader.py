"""Uploads through a process of their own: same bytes, same errors, and nothing left behind."""

import json
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from headrace.errors import ConfigError, StorageUnavailable
from headrace.s3_upload_process import NICENESS
from headrace.s3_uploader import Uploader
from headrace.storage import Storage
from tests.headrace.s3_proxy import DROP, Answer, Proxy

WAIT_SECONDS = 30


@pytest.fixture
def uploader(s3_root: str) -> Iterator[Uploader]:
    uploader = Uploader(s3_root)
    uploader.start()
    yield uploader
    uploader.close()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source"
    path.write_bytes(bytes(range(256)) * 1000)
    return path


def soon(seconds: float = 60.0) -> float:
    return time.monotonic() + seconds


def until_gone(pid: int) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, f"process {pid} is still alive"
        time.sleep(0.02)


def test_files_arrive_one_after_the_other(uploader: Uploader, s3_root: str, source: Path):
    for key in ("a", "b/c"):
        uploader.upload(source, key, until=soon())
    storage = Storage.open(s3_root)
    assert storage.list() == ["a", "b/c"]
    assert storage.read_bytes("b/c") == source.read_bytes()


def test_the_process_is_nice_and_loads_no_torch(uploader: Uploader, source: Path):
    uploader.upload(source, "a", until=soon())
    assert uploader.pid is not None
    process = psutil.Process(uploader.pid)
    assert process.nice() == min(19, psutil.Process().nice() + NICENESS)
    assert not [part.path for part in process.memory_maps() if "torch" in part.path]


def test_no_secret_is_on_its_command_line(uploader: Uploader):
    assert uploader.pid is not None
    assert os.environ["AWS_SECRET_ACCESS_KEY"] not in " ".join(psutil.Process(uploader.pid).cmdline())


def test_errors_are_those_of_the_storage(uploader: Uploader, tmp_path: Path, source: Path):
    with pytest.raises(StorageUnavailable, match=r"Cannot read .*missing: No such file"):
        uploader.upload(tmp_path / "missing", "a", until=soon())
    uploader.upload(source, "a", until=soon())
    wrong = Uploader("s3://no-such-bucket-here/prefix")
    wrong.start()
    try:
        with pytest.raises(ConfigError, match="no such bucket"):
            wrong.upload(source, "a", until=soon())
    finally:
        wrong.close()


def test_a_store_that_comes_back_is_waited_for(proxy: Proxy, proxied: Storage, source: Path):
    left = [DROP] * 12
    proxy.before = lambda method, path: left.pop() if left and method == "PUT" else None
    uploader = Uploader(proxied.root_url)
    uploader.start()
    try:
        uploader.upload(source, "a", until=soon())
    finally:
        uploader.close()
    assert proxied.read_bytes("a") == source.read_bytes()


def test_an_upload_has_its_time_and_no_more(proxy: Proxy, proxied: Storage, source: Path):
    # The last refusal, or the time itself, when it runs out during a request.
    told = "did not answer as it should|0 of 256,000 bytes were sent in 3 s"
    proxy.before = lambda method, path: Answer(503) if method == "PUT" else None
    uploader = Uploader(proxied.root_url)
    uploader.start()
    try:
        with pytest.raises(StorageUnavailable, match=told):
            uploader.upload(source, "a", until=soon(3.0))
    finally:
        uploader.close()


def test_a_process_that_does_not_end_in_time_is_killed_and_another_one_begins(
    uploader: Uploader, s3_root: str, source: Path, monkeypatch: pytest.MonkeyPatch
):
    uploader.upload(source, "a", until=soon())
    monkeypatch.setattr("headrace.s3_uploader.GRACE_SECONDS", 0.2)
    first = uploader.pid
    assert first is not None
    psutil.Process(first).suspend()
    with pytest.raises(StorageUnavailable, match=r"b: 0 of 256,000 bytes were sent in 1 s, and then"):
        uploader.upload(source, "b", until=soon(1.0))
    assert uploader.pid is None
    monkeypatch.undo()


def test_a_killed_process_is_told_and_replaced(uploader: Uploader, s3_root: str, source: Path):
    first = uploader.pid
    assert first is not None
    uploader.upload(source, "a", until=soon())
    psutil.Process(first).kill()
    with pytest.raises(StorageUnavailable, match="upload process ended with code -9"):
        uploader.upload(source, "b", until=soon())
    uploader.start()
    assert uploader.pid not in (None, first)
    uploader.upload(source, "b", until=soon())
    assert Storage.open(s3_root).list() == ["a", "b"]


def test_a_stop_is_for_the_parent_only(uploader: Uploader, source: Path):
    uploader.upload(source, "a", until=soon())
    assert uploader.pid is not None
    psutil.Process(uploader.pid).terminate()
    uploader.upload(source, "b", until=soon())


def test_it_dies_with_its_parent(s3_root: str, tmp_path: Path):
    script = textwrap.dedent(f"""
        import json, os, signal, sys, time
        from pathlib import Path
        from headrace.s3_uploader import Uploader
        uploader = Uploader({s3_root!r})
        uploader.start()
        Path({str(tmp_path)!r}, "file").write_bytes(b"x")
        uploader.upload(Path({str(tmp_path)!r}, "file"), "a", until=time.monotonic() + 60)
        print(json.dumps(uploader.pid), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == -9, done.stderr
    until_gone(json.loads(done.stdout))
