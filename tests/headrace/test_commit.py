"""A commit is believed only as it was written, and only one commit can exist at a place."""

import json
import secrets
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.commit import COMMIT_NAME, Commit, FileEntry, check_files, read_commit, write_commit
from headrace.digest import digest_json
from headrace.errors import CommitConflict, DamagedData, HeadraceError, StorageUnavailable
from headrace.storage import Storage

FILES = {"train-000000.tar": b"shard", "deep/er.bin": b"", "metadata.json": b"{}"}
ENTRIES = {name: FileEntry.of_bytes(data) for name, data in FILES.items()}


@pytest.fixture
def memory() -> Storage:
    return Storage.open(f"memory://{secrets.token_hex(8)}")


def write_files(storage: Storage, prefix: str) -> None:
    for name, data in FILES.items():
        storage.write_bytes(f"{prefix}/{name}" if prefix else name, data)


def commit(storage: Storage, prefix: str = "units/1", **changes: Any) -> Commit:
    arguments: dict[str, Any] = {"kind": "unit", "body": {"tokens": 5}, "files": ENTRIES, **changes}
    return write_commit(storage, prefix, **arguments)


def test_write_then_read(storage: Storage):
    write_files(storage, "units/1")
    assert read_commit(storage, "units/1", kind="unit") is None
    written = commit(storage, body={"tokens": 5, "config": {"name": "ä", "range": (1, 2.5)}})
    assert read_commit(storage, "units/1", kind="unit") == written
    assert written.body == {"tokens": 5, "config": {"name": "ä", "range": [1, 2.5]}}
    assert written.files == ENTRIES
    for content in (False, True):
        check_files(storage, "units/1", written, content=content)


def test_the_stored_document(memory: Storage):
    """The format is read by others and by later versions."""
    written = write_commit(memory, "d", kind="dataset", body={"a": 1}, files={}, name="manifest.json")
    content = {"kind": "dataset", "format_version": 1, "body": {"a": 1}, "files": {}}
    assert memory.read_json("d/manifest.json") == {**content, "digest": digest_json(content)} == written.document()
    assert written.digest == "cc322e072d07275a7aad6765f5210437fdc2ad2ce14c0e26b4644de3eaeebf33"
    assert memory.read_bytes("d/manifest.json").startswith(b'{\n "body": {\n  "a": 1\n },\n "digest": "cc32')
    assert memory.list() == ["d/manifest.json"]


def test_at_the_root(memory: Storage):
    write_files(memory, "")
    check_files(memory, "", commit(memory, ""), content=True)
    assert read_commit(memory, "", kind="unit") is not None


def test_entries_of_files(tmp_path: Path):
    (tmp_path / "file").write_bytes(b"shard")
    assert FileEntry.of_file(tmp_path / "file") == FileEntry.of_bytes(b"shard") == ENTRIES["train-000000.tar"]


def test_the_same_work_twice(storage: Storage):
    first = commit(storage)
    assert commit(storage) == first


def test_other_work_at_the_same_place(storage: Storage):
    commit(storage)
    for changes in ({"body": {"tokens": 6}}, {"files": {}}, {"body": {"tokens": 5.0}}):
        with pytest.raises(CommitConflict, match=r"units/1/COMMIT.json already holds another unit"):
            commit(storage, **changes)
    with pytest.raises(DamagedData, match="commits a 'unit', but a 'export' was expected"):
        commit(storage, kind="export")
    assert commit(storage).body == {"tokens": 5}


def test_a_lost_answer(memory: Storage, monkeypatch: pytest.MonkeyPatch):
    create = memory.create

    def create_and_lose(key: str, data: bytes) -> bool:
        create(key, data)
        raise StorageUnavailable("lost")

    with monkeypatch.context() as patch:
        patch.setattr(memory, "create", create_and_lose)
        with pytest.raises(StorageUnavailable):
            commit(memory)
    assert commit(memory) == read_commit(memory, "units/1", kind="unit")


def test_of_two_different_writers_one_is_refused(storage: Storage):
    outcomes: list[object] = []
    start = threading.Barrier(4)

    def write(number: int) -> None:
        start.wait()
        try:
            outcomes.append(commit(storage, body={"writer": number}).body["writer"])
        except CommitConflict:
            outcomes.append(None)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (winner,) = [outcome for outcome in outcomes if outcome is not None]
    found = read_commit(storage, "units/1", kind="unit")
    assert found is not None
    assert found.body == {"writer": winner}


def test_missing_and_changed_files(storage: Storage):
    write_files(storage, "units/1")
    written = commit(storage)
    storage.write_bytes("units/1/train-000000.tar", b"shart")
    check_files(storage, "units/1", written, content=False)
    with pytest.raises(DamagedData, match=r"train-000000.tar does not have the digest"):
        check_files(storage, "units/1", written, content=True)
    storage.write_bytes("units/1/train-000000.tar", b"shar")
    with pytest.raises(DamagedData, match=r"train-000000.tar has 4 bytes, but its commit says 5"):
        check_files(storage, "units/1", written, content=False)
    storage.delete("units/1/train-000000.tar")
    with pytest.raises(DamagedData, match=r"train-000000.tar is missing, but its commit names it \(5 bytes\)"):
        check_files(storage, "units/1", written, content=False)


def test_a_single_file_is_looked_at_without_a_listing(memory: Storage, monkeypatch: pytest.MonkeyPatch):
    memory.write_bytes("e/result.json", b"{}")
    written = write_commit(memory, "e", kind="evaluation", body={}, files={"result.json": FileEntry.of_bytes(b"{}")})
    monkeypatch.setattr(memory, "sizes", None)
    check_files(memory, "e", written, content=True)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"kind": "unit"}', '{"digest": 1}', "\xff"])
def test_what_is_no_commit(memory: Storage, text: str):
    memory.write_bytes("units/1/COMMIT.json", text.encode("latin-1"))
    with pytest.raises(DamagedData, match=r"units/1/COMMIT.json is not a"):
        read_commit(memory, "units/1", kind="unit")
    with pytest.raises(DamagedData):
        commit(memory)


def test_wrong_types_inside(memory: Storage):
    document = commit(memory).document()
    for changes in (
        {"files": []},
        {"files": {"a": 1}},
        {"files": {"a": {"size": "x", "sha256": ""}}},
        {"body": 1},
        {"format_version": "x"},
    ):
        memory.write_json("units/2/COMMIT.json", {**document, **changes})
        with pytest.raises(DamagedData):
            read_commit(memory, "units/2", kind="unit")


def test_a_newer_format(memory: Storage):
    memory.write_json("units/1/COMMIT.json", {"format_version": 2, "everything": "else"})
    with pytest.raises(HeadraceError, match="has format version 2, but this headrace reads up to 1"):
        read_commit(memory, "units/1", kind="unit")


def test_bodies_that_are_no_json(memory: Storage):
    for body in ({"loss": float("nan")}, {"a": {1: 2}}):
        with pytest.raises(ValueError):
            commit(memory, body=body)
    with pytest.raises(TypeError):
        commit(memory, body={"path": Path("x")})
    for name in ("../outside", "/absolute", "a//b"):
        with pytest.raises(ValueError):
            commit(memory, files={name: FileEntry.of_bytes(b"")})
    assert memory.list() == []


_WRITTEN = Storage.open("memory://test-commit")


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_changed_byte_is_found(data: st.DataObject):
    """Damage is either seen or has no effect on what is read (white space)."""
    written = commit(_WRITTEN, "original")
    document = bytearray(_WRITTEN.read_bytes(f"original/{COMMIT_NAME}"))
    position = data.draw(st.integers(0, len(document) - 1))
    document[position] ^= data.draw(st.integers(1, 255))
    _WRITTEN.write_bytes(f"damaged/{COMMIT_NAME}", bytes(document))
    try:
        found = read_commit(_WRITTEN, "damaged", kind="unit")
    except HeadraceError:
        return
    assert found == written
    assert json.loads(bytes(document)) == written.document()
