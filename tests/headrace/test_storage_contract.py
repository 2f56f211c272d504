"""What every kind of storage promises, on a folder, in memory and on S3."""

import pickle
import threading
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.digest import sha256_bytes
from headrace.errors import DamagedData, NotFound
from headrace.storage import Storage, check_key, json_document


def test_write_then_read(storage: Storage):
    storage.write_bytes("a/b/c.bin", b"first")
    storage.write_bytes("a/b/c.bin", b"second")
    assert storage.read_bytes("a/b/c.bin") == b"second"
    assert storage.size("a/b/c.bin") == 6
    assert storage.exists("a/b/c.bin")


def test_an_empty_object(storage: Storage):
    storage.write_bytes("empty", b"")
    assert storage.read_bytes("empty") == b""
    assert storage.size("empty") == 0
    assert storage.read_range("empty", 0, 0) == b""
    assert storage.sha256("empty") == sha256_bytes(b"")


def test_a_missing_object(storage: Storage, tmp_path: Path):
    storage.write_bytes("a/b", b"x")
    for key in ("missing", "a", "a/b/c"):  # nothing, a folder, below an object
        assert not storage.exists(key)
        for ask in (storage.size, storage.read_bytes, storage.read_json, storage.sha256):
            with pytest.raises(NotFound):
                ask(key)
        with pytest.raises(NotFound):
            storage.read_range(key, 0, 1)
        with pytest.raises(NotFound):
            storage.get_file(key, tmp_path / "local")
        assert not (tmp_path / "local").exists()


def test_ranges(storage: Storage):
    data = bytes(range(256))
    storage.write_bytes("data", data)
    assert storage.read_range("data", 0, 256) == data
    assert storage.read_range("data", 10, 5) == data[10:15]
    assert storage.read_range("data", 255, 1) == data[255:]
    assert storage.read_range("data", 300, 0) == b""
    for start, length in ((250, 7), (256, 1), (1000, 1)):
        with pytest.raises(DamagedData, match="shorter than its index says"):
            storage.read_range("data", start, length)
    with pytest.raises(ValueError):
        storage.read_range("data", -1, 2)
    with pytest.raises(ValueError):
        storage.read_range("data", 0, -2)


def test_json(storage: Storage):
    document = {"b": [1, 2.5, None, "ä"], "a": {"nested": True}}
    storage.write_json("a.json", document)
    assert storage.read_json("a.json") == document
    assert storage.read_bytes("a.json") == json_document(document)
    for damaged in (b'{"b": [1, 2', b"", b"\xff\xfe"):
        storage.write_bytes("a.json", damaged)
        with pytest.raises(DamagedData, match=r"a\.json is not a complete JSON document"):
            storage.read_json("a.json")
    with pytest.raises(ValueError):
        storage.write_json("a.json", {"loss": float("nan")})


def test_listings(storage: Storage):
    assert storage.list() == storage.children() == []
    assert storage.list("missing") == storage.children("missing") == []
    for key in ("b/2/x", "b/1", "a", "b-c/y", "b/10", "c/d/e/f"):
        storage.write_bytes(key, key.encode())
    assert storage.list() == ["a", "b-c/y", "b/1", "b/10", "b/2/x", "c/d/e/f"]
    assert storage.children() == ["a", "b", "b-c", "c"]
    assert storage.list("b") == ["b/1", "b/10", "b/2/x"]  # a folder, not a prefix of names: no b-c
    assert storage.children("b") == ["1", "10", "2"]
    assert storage.list("b/1") == storage.children("b/1") == []  # an object has nothing below it
    assert storage.children("c") == ["d"]
    assert storage.sizes("b") == {"b/1": 3, "b/10": 4, "b/2/x": 5}


def test_listings_are_never_stale(storage: Storage):
    other = Storage.open(storage.root_url)
    assert storage.list("step") == []
    other.write_bytes("step/1", b"x")
    assert storage.list("step") == ["step/1"]
    assert storage.children("step") == ["1"]
    assert storage.exists("step/1")
    other.delete("step/1")
    assert storage.list("step") == storage.children("step") == storage.children() == []
    assert not storage.exists("step/1")


def test_create_only_once(storage: Storage):
    assert storage.create("claims/0001", b"mine")
    assert not storage.create("claims/0001", b"yours")
    assert not storage.create("claims/0001", b"mine")  # equal bytes do not make it ours
    assert storage.read_bytes("claims/0001") == b"mine"
    storage.delete("claims/0001")
    assert storage.create("claims/0001", b"yours")
    with pytest.raises(ValueError, match="a created object may have"):
        storage.create("large", bytes((64 << 20) + 1))


def test_one_of_many_creators_wins(storage: Storage):
    for round_number in range(10):
        key = f"race/{round_number}"
        start = threading.Barrier(8)
        won: list[int] = []

        def create(number: int, key: str = key, start: threading.Barrier = start, won: list[int] = won) -> None:
            start.wait()
            if storage.create(key, str(number).encode()):
                won.append(number)

        threads = [threading.Thread(target=create, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(won) == 1
        assert storage.read_bytes(key) == str(won[0]).encode()


def test_the_probe_accepts_and_leaves_nothing(storage: Storage):
    storage.probe_create_only()
    assert storage.list() == []


def test_files_there_and_back(storage: Storage, tmp_path: Path):
    source = tmp_path / "source"
    source.write_bytes(b"tensor" * 1000)
    storage.put_file(source, "runs/file.bin")
    source.write_bytes(b"reused buffer")  # a copy was taken, not a link
    assert storage.sha256("runs/file.bin") == sha256_bytes(b"tensor" * 1000)
    target = tmp_path / "new" / "target"
    storage.get_file("runs/file.bin", target)
    assert target.read_bytes() == b"tensor" * 1000
    assert sorted(path.name for path in target.parent.iterdir()) == ["target"]
    with pytest.raises(FileNotFoundError):
        storage.put_file(tmp_path / "missing", "runs/other")


def test_files_larger_than_one_part(storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("headrace.s3_store.PART_BYTES", 5 << 20)
    monkeypatch.setattr("headrace.storage._HASH_BYTES", 3 << 20)
    data = bytes(range(251)) * ((12 << 20) // 251)
    source = tmp_path / "source"
    source.write_bytes(data)
    storage.put_file(source, "large")
    storage.get_file("large", tmp_path / "target")
    assert (tmp_path / "target").read_bytes() == data
    assert storage.sha256("large") == sha256_bytes(data)
    storage.write_bytes("large-bytes", data)
    assert storage.read_bytes("large-bytes") == data
    assert storage.read_range("large-bytes", 6 << 20, 1000) == data[6 << 20 : (6 << 20) + 1000]


def test_delete(storage: Storage):
    for key in ("a/1", "a/b/2", "a-b/3", "c"):
        storage.write_bytes(key, b"x")
    storage.delete("a/1")
    storage.delete("a/1")
    storage.delete("c/below-an-object")
    assert storage.list() == ["a-b/3", "a/b/2", "c"]
    storage.delete_prefix("a")
    storage.delete_prefix("a")
    assert storage.list() == ["a-b/3", "c"]
    with pytest.raises(ValueError, match="needs a prefix"):
        storage.delete_prefix("")


def test_travels_to_other_processes(storage: Storage):
    storage.write_bytes("a", b"x")
    copy = pickle.loads(pickle.dumps(storage))
    assert copy.root_url == storage.root_url
    assert copy.read_bytes("a") == b"x"


def test_urls(storage: Storage):
    assert storage.url() == storage.root_url
    assert storage.url("a/b") == f"{storage.root_url}/a/b"
    path = storage.local_path("a/b")
    assert (path is not None) == storage.root_url.startswith("file://")
    assert repr(storage) == f"Storage({storage.root_url!r})"


_REFUSED = [
    "",
    "/a",
    "a/",
    "a//b",
    "..",
    "a/../b",
    "./a",
    "a/.",
    "a b",
    "a\\b",
    "a\n",
    "a\0",
    "ä",
    "a?versionId=1",
    "a#b",
]
_REFUSED += ["%2e", "a*", "a[1]", "x" * 256, "/".join(["x" * 200] * 5), "a/.headrace-tmp-1", "${HOME}", "a:b"]


@pytest.mark.parametrize("key", _REFUSED)
def test_refused_keys(storage: Storage, key: str):
    for use in (storage.exists, storage.size, storage.read_bytes, storage.delete, storage.delete_prefix):
        with pytest.raises(ValueError):
            use(key)
    with pytest.raises(ValueError):
        storage.write_bytes(key, b"")
    with pytest.raises(ValueError):
        storage.create(key, b"")
    if key:
        with pytest.raises(ValueError):
            storage.list(key)
        with pytest.raises(ValueError):
            storage.local_path(key)


_parts = st.text(st.sampled_from("aZ09._=+@,~-"), min_size=1, max_size=12).filter(lambda part: part not in (".", ".."))
_keys = st.lists(_parts, min_size=1, max_size=4).map("/".join)


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(key=_keys, data=st.binary(max_size=100))
def test_every_valid_key_works_everywhere(storage: Storage, key: str, data: bytes):
    assert check_key(key) == key
    storage.write_bytes(key, data)
    assert storage.list() == [key]
    assert storage.children() == [key.split("/")[0]]
    assert storage.read_bytes(key) == data
    storage.delete_prefix(key.split("/")[0])
    storage.delete(key)
    assert storage.list() == []
