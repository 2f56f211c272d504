"""What S3 does when the server, the way to it, or the credentials fail."""

import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from headrace.errors import ConfigError, HeadraceError, NotFound, StorageFull, StorageUnavailable
from headrace.storage import Storage
from tests.headrace.s3_proxy import BUCKET, DROP, Answer, Proxy, free_port, use_endpoint


def s3_error(status: int, code: str) -> Answer:
    body = f"<?xml version='1.0' encoding='UTF-8'?><Error><Code>{code}</Code><Message>{code}!</Message></Error>"
    return Answer(status, body.encode())


def once(answer: Answer | str, method: str):
    """Answer the first request of this method so, and let all others through."""
    left = [answer]
    return lambda found, *_: left.pop() if left and found == method else None


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds that a test can wait for; two tries are enough to see that there is a second one."""
    monkeypatch.setattr("headrace.s3_client.TOTAL_ATTEMPTS", 2)
    monkeypatch.setattr("headrace.s3_client.CLIENT_ROUNDS", 1)


def test_a_lost_answer_to_create_is_not_a_lost_race(proxy: Proxy, proxied: Storage):
    proxy.after = once(DROP, "PUT")
    assert proxied.create("claim", b"mine")  # the second request met the object of the first
    assert [method for method, _ in proxy.requests].count("PUT") == 2
    assert proxied.read_bytes("claim") == b"mine"
    assert not proxied.create("claim", b"mine")


def test_a_lost_answer_to_a_create_that_had_lost(proxy: Proxy, proxied: Storage):
    assert proxied.create("claim", b"the same bytes")
    proxy.after = once(DROP, "PUT")
    assert not proxied.create("claim", b"the same bytes")


def test_a_refusal_without_any_text(proxy: Proxy, proxied: Storage):
    """Ceph RGW answers a failed condition with an empty body."""
    proxied.create("claim", b"theirs")
    proxy.after = lambda method, path, status: Answer(412) if status == 412 else None
    assert not proxied.create("claim", b"mine")
    assert proxied.read_bytes("claim") == b"theirs"


def test_a_create_at_the_same_moment_as_another(proxy: Proxy, proxied: Storage):
    proxy.before = once(s3_error(409, "ConditionalRequestConflict"), "PUT")
    assert proxied.create("claim", b"mine")
    proxy.before = lambda method, path: s3_error(409, "ConditionalRequestConflict") if method == "PUT" else None
    with pytest.raises(StorageUnavailable, match="other writers of the same key"):
        proxied.create("another", b"mine")


def test_an_object_that_vanishes_between_refusal_and_look(proxy: Proxy, proxied: Storage):
    proxy.before = once(s3_error(412, "PreconditionFailed"), "PUT")
    assert proxied.create("claim", b"mine")


def test_the_probe_refuses_a_store_without_conditions(proxy: Proxy, proxied: Storage):
    proxy.strip_condition = True
    with pytest.raises(ConfigError, match="does not honour create-only writes"):
        proxied.probe_create_only()
    proxy.strip_condition = False
    assert proxied.list() == []


def test_the_probe_refuses_a_store_that_does_not_know_conditions(proxy: Proxy, proxied: Storage):
    proxy.before = lambda method, path: s3_error(501, "NotImplemented") if method == "PUT" else None
    with pytest.raises(ConfigError):
        proxied.probe_create_only()


@pytest.mark.parametrize("hiccup", [s3_error(503, "SlowDown"), s3_error(500, "InternalError"), DROP])
def test_one_hiccup_is_not_seen(proxy: Proxy, proxied: Storage, hiccup: Answer | str, tmp_path: Path):
    (tmp_path / "file").write_bytes(b"content")
    proxied.write_bytes("key", b"value")
    for method, use in [
        ("PUT", lambda: proxied.write_bytes("key", b"value")),
        ("PUT", lambda: proxied.put_file(tmp_path / "file", "file")),
        ("GET", lambda: proxied.read_bytes("key")),
        ("GET", lambda: proxied.list()),
        ("HEAD", lambda: proxied.size("key")),
        ("DELETE", lambda: proxied.delete("key")),
    ]:
        proxy.before = once(hiccup, method)
        use()
    assert proxied.read_bytes("file") == b"content"
    assert not proxied.exists("key")


@pytest.mark.parametrize("failure", [s3_error(503, "SlowDown"), s3_error(500, "InternalError"), DROP])
def test_an_outage_is_retryable(
    proxy: Proxy, proxied: Storage, failure: Answer | str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("headrace.s3_client.TOTAL_ATTEMPTS", 1)
    (tmp_path / "file").write_bytes(b"content")
    proxy.before = lambda method, path: failure
    for use in (
        lambda: proxied.write_bytes("key", b"value"),
        lambda: proxied.create("key", b"value"),
        lambda: proxied.put_file(tmp_path / "file", "key"),
        lambda: proxied.read_bytes("key"),
        lambda: proxied.exists("key"),
        lambda: proxied.get_file("key", tmp_path / "target"),
        lambda: proxied.list(),
        lambda: proxied.children(),
        lambda: proxied.delete("key"),
    ):
        with pytest.raises(StorageUnavailable, match=f"{proxy.endpoint} did not answer as it should") as caught:
            use()
        assert caught.value.retryable
        assert caught.value.exit_code == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]


def test_a_server_that_is_not_there(monkeypatch: pytest.MonkeyPatch):
    endpoint = f"http://127.0.0.1:{free_port()}"
    use_endpoint(monkeypatch, endpoint)
    with pytest.raises(StorageUnavailable, match=rf"Cannot read s3://{BUCKET}/a: {endpoint} did not answer"):
        Storage.open(f"s3://{BUCKET}").read_bytes("a")


def test_an_endpoint_that_is_no_url(monkeypatch: pytest.MonkeyPatch):
    use_endpoint(monkeypatch, "localhost:9000")
    with pytest.raises(ConfigError, match=r"'localhost:9000' \(AWS_ENDPOINT_URL\) must begin with http"):
        Storage.open(f"s3://{BUCKET}").read_bytes("a")
    use_endpoint(monkeypatch, f"http://user:hunter22@127.0.0.1:{free_port()}")
    with pytest.raises(StorageUnavailable, match=r"http://127\.0\.0\.1:\d+ did not answer") as caught:
        Storage.open(f"s3://{BUCKET}").read_bytes("a")
    assert "hunter22" not in str(caught.value)


def test_a_server_that_never_answers(proxy: Proxy, proxied: Storage, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("headrace.s3_client.TOTAL_ATTEMPTS", 1)
    monkeypatch.setattr("headrace.s3_client.READ_SECONDS", 1)
    hang = threading.Event()
    proxy.before = lambda method, path: hang.wait(60) and None
    try:
        with pytest.raises(StorageUnavailable):
            proxied.read_bytes("a")  # the client's own read timeout
    finally:
        hang.set()


def test_the_deadline_over_all_tries(proxy: Proxy, proxied: Storage, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("headrace.s3_client.READ_SECONDS", 60)
    monkeypatch.setattr("headrace.s3_client.DEADLINE_SECONDS", 1.0)
    hang = threading.Event()
    proxy.before = lambda method, path: hang.wait(60) and None
    try:
        with pytest.raises(StorageUnavailable, match="FSTimeoutError"):
            proxied.write_bytes("a", b"x")
    finally:
        hang.set()


def test_wrong_credentials(proxy: Proxy, proxied: Storage):
    for code in ("InvalidAccessKeyId", "SignatureDoesNotMatch", "AccessDenied", "AllAccessDisabled"):
        check_wrong_credentials(proxy, proxied, code)


def check_wrong_credentials(proxy: Proxy, proxied: Storage, code: str) -> None:
    proxy.before = lambda method, path: s3_error(403, code)
    with pytest.raises(
        ConfigError, match=f"did not accept the credentials \\({code}\\). Set AWS_ACCESS_KEY_ID"
    ) as caught:
        proxied.write_bytes("a", b"x")
    assert caught.value.exit_code == 2
    assert "not-a-secret" not in str(caught.value)
    with pytest.raises(ConfigError):
        proxied.exists("a")  # the answer to HEAD has no body, so only the status tells


def test_no_credentials(proxy: Proxy, proxied: Storage, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(ConfigError, match=r"did not accept the credentials \(NoCredentialsError\)"):
        proxied.write_bytes("a", b"x")


ERROR_CODES: list[tuple[int, str, type[HeadraceError], str]] = [
    (400, "ExpiredToken", StorageUnavailable, "Renew the credentials"),
    (403, "RequestTimeTooSkewed", StorageUnavailable, "correct the clock"),
    (400, "AuthorizationHeaderMalformed", ConfigError, "AWS_REGION"),
    (404, "NoSuchBucket", ConfigError, "no such bucket"),
    (403, "QuotaExceeded", StorageFull, r"\(1 bytes\): .* has no room"),
    (507, "InsufficientCapacity", StorageFull, "Free space or raise the quota"),
    (418, "Teapot", StorageUnavailable, "Teapot"),
]


def test_what_an_error_code_means(proxy: Proxy, proxied: Storage):
    for status, code, kind, text in ERROR_CODES:
        answer = s3_error(status, code)
        proxy.before = lambda method, path, answer=answer: answer
        with pytest.raises(kind, match=text) as caught:
            proxied.write_bytes("a", b"x")
        assert type(caught.value) is kind


def test_a_missing_bucket(s3_root: str):
    storage = Storage.open("s3://no-such-bucket-here/prefix")
    with pytest.raises(ConfigError, match="no such bucket"):
        storage.write_bytes("a", b"x")
    with pytest.raises(ConfigError, match="no such bucket"):
        storage.list()


def test_many_objects(proxy: Proxy, proxied: Storage, monkeypatch: pytest.MonkeyPatch):
    """Listings come in pages, and deletions go in batches."""
    monkeypatch.setattr("headrace.s3_store.PAGE_KEYS", 3)
    keys = [f"many/{number}/{kind}" for number in range(4) for kind in ("a", "b")]
    for key in keys:
        proxied.write_bytes(key, b"")
    proxy.requests.clear()
    assert proxied.list("many") == keys
    assert proxied.children("many") == ["0", "1", "2", "3"]
    assert [method for method, _ in proxy.requests] == ["GET"] * (3 + 2)
    proxied.delete_prefix("many")
    assert [method for method, _ in proxy.requests].count("POST") == 3
    assert proxied.list() == []


def test_unfinished_uploads_are_removed_where_they_are_stale(proxy: Proxy, proxied: Storage):
    import boto3

    client = boto3.client("s3")
    prefix = proxied.root_url.removeprefix(f"s3://{BUCKET}/")
    keys = ["a/old", "a/old", "a/new", "b/old"]
    for key in keys:
        client.create_multipart_upload(Bucket=BUCKET, Key=f"{prefix}/{key}")
    assert proxied.abort_uploads("a", lambda key: key == "a/old") == 2
    left = client.list_multipart_uploads(Bucket=BUCKET, Prefix=prefix)["Uploads"]
    assert sorted(upload["Key"] for upload in left) == [f"{prefix}/a/new", f"{prefix}/b/old"]
    assert proxied.abort_uploads("", lambda key: True) == 2
    assert proxied.abort_uploads("", lambda key: True) == 0
    assert Storage.open("memory://none").abort_uploads("", lambda key: True) == 0


def test_a_failed_deletion_is_told(proxy: Proxy, proxied: Storage):
    proxied.write_bytes("a/b", b"x")
    refused = b"<DeleteResult><Error><Key>a/b</Key><Code>InternalError</Code></Error></DeleteResult>"
    proxy.before = lambda method, path: Answer(200, refused) if method == "POST" else None
    with pytest.raises(StorageUnavailable, match=r"Cannot delete 1 objects below .*: InternalError"):
        proxied.delete_prefix("a")


def test_an_object_cut_short_on_the_way(proxy: Proxy, proxied: Storage, tmp_path: Path):
    proxied.write_bytes("a", b"0123456789")
    proxy.after = lambda method, path, status: Answer(status, b"01234") if method == "GET" else None
    with pytest.raises(StorageUnavailable, match="changed while it was read"):
        proxied.get_file("a", tmp_path / "target")
    assert list(tmp_path.iterdir()) == []


def test_folders_made_by_consoles_are_not_objects(proxy: Proxy, proxied: Storage):
    proxied.write_bytes("a/b", b"x")
    import boto3

    client = boto3.client("s3")
    prefix = proxied.root_url.removeprefix(f"s3://{BUCKET}/")
    client.put_object(Bucket=BUCKET, Key=f"{prefix}/a/", Body=b"")
    client.put_object(Bucket=BUCKET, Key=f"{prefix}/", Body=b"")
    assert proxied.list() == ["a/b"]
    assert proxied.children("a") == ["b"]
    assert proxied.children() == ["a"]


@pytest.mark.parametrize(
    "url",
    ["s3://", "s3:///prefix", "s3://ab", "s3://key:secret@bucket/prefix", "s3://bucket:9000/x", "s3://bucket?versions"],
)
def test_urls_that_are_refused(url: str):
    with pytest.raises(ConfigError, match="must look like s3://bucket/prefix") as caught:
        Storage.open(url)
    assert "secret" not in str(caught.value)


def test_urls_are_normalised():
    assert Storage.open("s3://bucket").url("a") == "s3://bucket/a"
    assert Storage.open("s3://bucket/").root_url == "s3://bucket"
    assert Storage.open("s3://bucket/a/b/").root_url == "s3://bucket/a/b"
    with pytest.raises(ConfigError):
        Storage.open("s3://bucket/a b")
    with pytest.raises(ConfigError, match="kind 'gs' is not supported"):
        Storage.open("gs://bucket")


def run_python(source: str) -> str:
    script = textwrap.dedent(source)
    done = subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def test_opening_contacts_and_loads_nothing(monkeypatch: pytest.MonkeyPatch):
    use_endpoint(monkeypatch, "http://192.0.2.1:9")  # nobody answers there
    printed = run_python("""
        import socket, sys
        def refuse(*args): raise AssertionError("a connection")
        socket.socket.connect = refuse
        from headrace.storage import Storage
        storage = Storage.open("s3://bucket/prefix")
        storage.url("key")
        print(sorted({"s3fs", "fsspec", "botocore", "aiohttp"} & set(sys.modules)))
    """)
    assert printed == "[]\n"


def test_works_after_a_fork(s3_root: str):
    """A filesystem that was used before the fork would hang or refuse in the child."""
    printed = run_python(f"""
        import os, sys, warnings
        from headrace.storage import Storage
        storage = Storage.open({s3_root!r})
        storage.write_bytes("before", b"parent")
        warnings.simplefilter("ignore")  # newer versions warn of a fork beside threads
        child = os.fork()
        if child == 0:
            storage.write_bytes("after", storage.read_bytes("before") + b" and child")
            sys.stdout.flush()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        print(storage.read_bytes("after").decode())
    """)
    assert printed == "parent and child\n"


def test_works_inside_a_running_event_loop(s3_root: str):
    import asyncio

    async def use() -> bytes:
        storage = Storage.open(s3_root)
        storage.write_bytes("a", b"x")
        return storage.read_bytes("a")

    assert asyncio.run(use()) == b"x"


def test_the_object_is_missing_but_the_bucket_is_there(s3_root: str):
    with pytest.raises(NotFound, match=f"{s3_root}/a does not exist"):
        Storage.open(s3_root).read_bytes("a")
