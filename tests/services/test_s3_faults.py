"""A real server that is wrong, busy, silent, killed or away: the stated outcome, in bounded time, in one sentence."""

import json
import random
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headrace.errors import ConfigError, HeadraceError, NotFound, StorageUnavailable
from headrace.s3_uploader import Uploader
from headrace.storage import Storage
from tests.headrace.s3_proxy import Answer, Proxy
from tests.services.fault_proxy import busy, drops, s3_error, silent
from tests.services.rgw import Rgw

WRITERS, ROUNDS = 8, 20
LARGE_BYTES = 200 << 20
WAIT_SECONDS = 60.0


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of several parts, no two of them equal."""
    path = tmp_path_factory.mktemp("large") / "file.bin"
    with path.open("wb") as file:
        for number in range(LARGE_BYTES >> 20):
            file.write(number.to_bytes(4, "little") * (1 << 18))
    return path


@pytest.fixture
def uploader(storage: Storage) -> Iterator[Uploader]:
    running = Uploader(storage.root_url)
    running.start()
    yield running
    running.close()


def every_use(storage: Storage, folder: Path) -> list[Callable[[], object]]:
    (folder / "local").write_bytes(b"content")
    return [
        lambda: storage.write_bytes("key", b"value"),
        lambda: storage.create("created", b"value"),
        lambda: storage.put_file(folder / "local", "file"),
        lambda: storage.read_bytes("key"),
        lambda: storage.size("key"),
        lambda: storage.exists("key"),
        lambda: storage.get_file("key", folder / "target"),
        storage.list,
        storage.children,
        lambda: storage.delete("key"),
        lambda: storage.delete_prefix("folder"),
        storage.probe_create_only,
    ]


def check_sentence(rgw: Rgw, error: HeadraceError) -> None:
    """One line that names the place, and neither part of the credentials."""
    text = str(error)
    assert "\n" not in text
    assert "s3://" in text
    assert rgw.access_key not in text
    assert rgw.secret_key not in text


def chain(error: BaseException | None) -> str:
    """Everything that a traceback of the error would show of its causes."""
    told = []
    while error is not None:
        told.append(f"{type(error).__name__} {error} {error!r}")
        error = error.__cause__ or error.__context__
    return "\n".join(told)


# -------------------------------------------------------------------------------------------------------- claims


class Claimant:
    """A process that creates the keys it is told, and says whether it was first."""

    SOURCE = textwrap.dedent("""
        import os, sys
        from headrace.storage import Storage
        storage = Storage.open(sys.argv[1])
        storage.exists("warm")
        print("ready", flush=True)
        for line in sys.stdin:
            print(storage.create(line.strip(), str(os.getpid()).encode()), flush=True)
    """)

    def __init__(self, root: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", self.SOURCE, root], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def claim(self, key: str) -> None:
        assert self.process.stdin
        self.process.stdin.write(f"{key}\n")
        self.process.stdin.flush()

    def answer(self) -> str:
        assert self.process.stdout
        return self.process.stdout.readline().strip()

    def close(self) -> None:
        self.process.communicate()


def test_one_of_eight_processes_gets_each_claim(storage: Storage):
    claimants = [Claimant(storage.root_url) for _ in range(WRITERS)]
    assert {claimant.answer() for claimant in claimants} == {"ready"}
    for number in range(ROUNDS):
        key = f"claims/{number:04d}"
        for claimant in claimants:
            claimant.claim(key)
        answers = [claimant.answer() for claimant in claimants]
        assert sorted(answers) == ["False"] * (WRITERS - 1) + ["True"], f"round {number}"
        winner = claimants[answers.index("True")]
        assert storage.read_bytes(key) == str(winner.process.pid).encode()
    for claimant in claimants:
        claimant.close()


def test_what_another_process_commits_is_seen_by_one_that_has_listed_before(storage: Storage):
    """A28: a cached listing would hide it."""
    storage.write_bytes("checkpoints/step-10/COMMIT.json", b"{}")
    assert storage.children("checkpoints") == ["step-10"]
    assert not storage.exists("checkpoints/step-20/COMMIT.json")
    other = Claimant(storage.root_url)
    assert other.answer() == "ready"
    other.claim("checkpoints/step-20/COMMIT.json")
    assert other.answer() == "True"
    assert storage.children("checkpoints") == ["step-10", "step-20"]
    assert storage.list("checkpoints/step-20") == ["checkpoints/step-20/COMMIT.json"]
    assert storage.exists("checkpoints/step-20/COMMIT.json")
    Storage.open(storage.root_url).delete("checkpoints/step-10/COMMIT.json")
    assert storage.children("checkpoints") == ["step-20"]
    other.close()


# --------------------------------------------------------------------------------------------------- credentials


@pytest.mark.parametrize(
    ("variable", "value"),
    [("AWS_SECRET_ACCESS_KEY", "x" * 40), ("AWS_ACCESS_KEY_ID", "NOSUCHUSER0000000000")],
    ids=["wrong secret", "unknown key"],
)
def test_wrong_credentials(
    rgw: Rgw, s3_root: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variable: str, value: str
):
    monkeypatch.setenv(variable, value)
    for use in every_use(Storage.open(s3_root), tmp_path):
        with pytest.raises(ConfigError, match="did not accept the credentials") as caught:
            use()
        check_sentence(rgw, caught.value)
        assert value not in chain(caught.value)
        assert rgw.secret_key not in chain(caught.value)
        assert caught.value.exit_code == 2


def test_a_token_that_the_server_does_not_accept(rgw: Rgw, proxy: Proxy, proxied: Storage, tmp_path: Path):
    """As AWS answers; this version of RGW ignores tokens that it did not make."""
    proxy.before = lambda method, path: s3_error(400, "InvalidToken")
    with pytest.raises(ConfigError, match="InvalidToken") as caught:
        proxied.write_bytes("key", b"value")
    check_sentence(rgw, caught.value)


def test_an_expired_token_is_worth_another_try_with_new_credentials(rgw: Rgw, proxy: Proxy, proxied: Storage):
    proxy.before = lambda method, path: s3_error(400, "ExpiredToken")
    with pytest.raises(StorageUnavailable, match="says ExpiredToken") as caught:
        proxied.write_bytes("key", b"value")
    check_sentence(rgw, caught.value)
    proxy.before = lambda method, path: None
    proxied.write_bytes("key", b"value")
    assert proxied.read_bytes("key") == b"value"


def test_a_token_that_expires_during_an_upload_is_renewed(
    rgw: Rgw, proxy: Proxy, proxied: Storage, large: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Whatever makes the credentials is asked again, and the upload goes on with the parts that are missing."""
    calls = tmp_path / "calls"
    credentials = {"Version": 1, "AccessKeyId": rgw.access_key, "SecretAccessKey": rgw.secret_key}
    script = tmp_path / "credentials.sh"
    script.write_text(f"echo asked >> {calls}\necho '{json.dumps(credentials)}'\n", encoding="utf-8")
    (tmp_path / "config").write_text(f"[default]\ncredential_process = sh {script}\n", encoding="utf-8")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    sent, refused, asked = [], [], []

    def expire(method: str, path: str) -> Answer | None:
        if "partNumber=" not in path:
            return None
        asked.append(len(calls.read_text().splitlines()))
        if len(sent) < 2:
            sent.append(path)
        elif asked[-1] == asked[0]:
            refused.append(path)
            return s3_error(400, "ExpiredToken")
        return None

    proxy.before = expire
    proxied.upload(large, "large", until=time.monotonic() + 300, on_sent=lambda _: None)
    assert refused
    assert asked[-1] > asked[0]
    proxied.get_file("large", tmp_path / "back")
    assert same(large, tmp_path / "back")
    assert unfinished(rgw, proxied) == []


def test_a_missing_bucket(rgw: Rgw, s3_root: str):
    with pytest.raises(ConfigError, match="there is no such bucket"):
        Storage.open("s3://no-such-bucket-here/x").write_bytes("key", b"value")


# ------------------------------------------------------------------------------------------- busy, silent, away


@pytest.mark.parametrize("fault", [busy, drops], ids=["503", "dropped"])
def test_thirty_percent_failures_are_not_seen(
    proxy: Proxy, proxied: Storage, tmp_path: Path, fault: Callable[[float], object]
):
    several_parts = tmp_path / "several-parts"
    several_parts.write_bytes(random.Random(1).randbytes(80 << 20))
    proxy.before = fault(0.3)  # type: ignore[assignment]
    for number in range(30):
        proxied.write_bytes(f"small/{number:02d}", str(number).encode())
    proxied.put_file(several_parts, "large")
    assert proxied.create("claim", b"mine")
    assert not proxied.create("claim", b"mine")
    assert proxied.list("small") == [f"small/{number:02d}" for number in range(30)]
    assert [proxied.read_bytes(key) for key in proxied.list("small")] == [str(n).encode() for n in range(30)]
    proxied.get_file("large", tmp_path / "back")
    assert same(several_parts, tmp_path / "back")


def test_a_server_that_never_answers(
    rgw: Rgw, proxy: Proxy, proxied: Storage, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr("headrace.s3_client.READ_SECONDS", 60)
    monkeypatch.setattr("headrace.s3_client.DEADLINE_SECONDS", 1.0)
    monkeypatch.setattr("headrace.s3_store._ASSUMED_BYTES", 0)
    with silent(proxy):
        for use in every_use(proxied, tmp_path):
            started = time.monotonic()
            with pytest.raises(StorageUnavailable, match="did not answer as it should") as caught:
                use()
            check_sentence(rgw, caught.value)
            # Ten times the bound of one operation: the probe makes several.
            assert time.monotonic() - started < 10
    proxied.write_bytes("key", b"value")
    assert proxied.read_bytes("key") == b"value"


def test_a_server_that_is_away_and_comes_back(rgw: Rgw, storage: Storage, tmp_path: Path):
    storage.write_bytes("key", b"value")
    with rgw.without("radosgw"):
        for use in every_use(storage, tmp_path):
            started = time.monotonic()
            with pytest.raises(StorageUnavailable, match=f"{rgw.endpoint} did not answer as it should") as caught:
                use()
            check_sentence(rgw, caught.value)
            assert time.monotonic() - started < WAIT_SECONDS
    assert storage.read_bytes("key") == b"value"
    assert storage.list() == ["key"]


# ------------------------------------------------------------------------------------------- killed during an upload


class Sending:
    """An upload in a thread, which says how much was sent."""

    def __init__(self, storage: Storage, local: Path, key: str) -> None:
        self.sent = 0
        self.error: HeadraceError | None = None
        self._storage, self._local, self._key = storage, local, key
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._storage.upload(
                self._local, self._key, until=time.monotonic() + 300, on_sent=lambda size: self._add(size)
            )
        except HeadraceError as error:
            self.error = error

    def _add(self, size: int) -> None:
        self.sent += size

    def until_under_way(self) -> None:
        deadline = time.monotonic() + WAIT_SECONDS
        while not self.sent:
            assert time.monotonic() < deadline, self.error
            time.sleep(0.01)

    def end(self) -> None:
        self._thread.join()
        assert self.error is None


@pytest.mark.parametrize("part", ["radosgw", "osd"])
def test_a_server_killed_during_an_upload(rgw: Rgw, storage: Storage, large: Path, tmp_path: Path, part: str):
    storage.write_bytes("before", b"old")
    sending = Sending(storage, large, "large")
    sending.until_under_way()
    rgw.kill(part)  # type: ignore[arg-type]
    half = sending.sent
    rgw.restart(part)  # type: ignore[arg-type]
    assert half < LARGE_BYTES, "the upload was over before the kill; the test shows nothing"
    sending.end()
    storage.get_file("large", tmp_path / "back")
    assert same(large, tmp_path / "back")
    assert storage.read_bytes("before") == b"old"
    assert storage.list() == ["before", "large"]
    assert unfinished(rgw, storage) == []


def test_nothing_is_visible_of_a_file_whose_sender_was_killed(
    rgw: Rgw, storage: Storage, uploader: Uploader, large: Path, tmp_path: Path
):
    storage.write_bytes("large", b"the object before")
    failed = threading.Event()

    def send() -> None:
        with pytest.raises(StorageUnavailable, match="upload process ended with code -9"):
            uploader.upload(large, "large", until=time.monotonic() + WAIT_SECONDS)
        failed.set()

    thread = threading.Thread(target=send)
    thread.start()
    deadline = time.monotonic() + WAIT_SECONDS
    while not unfinished(rgw, storage):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert uploader.pid is not None
    subprocess.run(["kill", "-KILL", str(uploader.pid)], check=True)
    thread.join()
    assert failed.is_set()
    assert storage.read_bytes("large") == b"the object before"
    assert len(unfinished(rgw, storage)) == 1

    uploader.start()
    uploader.upload(large, "large", until=time.monotonic() + WAIT_SECONDS)
    storage.get_file("large", tmp_path / "back")
    assert same(large, tmp_path / "back")
    assert storage.abort_uploads("", lambda key: key == "large") == 1
    assert unfinished(rgw, storage) == []
    assert storage.size("large") == LARGE_BYTES


def unfinished(rgw: Rgw, storage: Storage) -> list[str]:
    """Keys of uploads that were begun and neither finished nor removed, as another client sees them."""
    prefix = storage.root_url.removeprefix(f"s3://{rgw.bucket}/")
    answer = rgw.client().list_multipart_uploads(Bucket=rgw.bucket, Prefix=prefix)
    return [upload["Key"] for upload in answer.get("Uploads", [])]


def same(one: Path, other: Path) -> bool:
    with one.open("rb") as first, other.open("rb") as second:
        while True:
            piece = first.read(1 << 24)
            if piece != second.read(1 << 24):
                return False
            if not piece:
                return True


def test_a_missing_object_is_missing(storage: Storage):
    with pytest.raises(NotFound):
        storage.read_bytes("missing")
