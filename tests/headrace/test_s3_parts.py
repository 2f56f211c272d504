"""Which parts a file has, and what happens to each of them."""

import threading
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import ConfigError, NotFound, StorageUnavailable
from headrace.s3_parts import WRITER, Part, parts_of, upload_parts

MANY = 1e9
DATA = bytes(range(250)) * 4


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.patience.time.sleep", lambda _: None)


class Server:
    """Takes parts as S3 does; `fault(operation, number of this call)` may raise before or after the deed."""

    def __init__(self, before: Any = None, after: Any = None) -> None:
        self.before = before or (lambda *_: None)
        self.after = after or (lambda *_: None)
        self.uploads: dict[str, dict[int, bytes]] = {}
        self.writers: dict[str, str] = {}
        self.published: bytes | None = None
        self.writer: str | None = None
        self.calls: list[str] = []
        self.at_once = self.most_at_once = 0
        self.lock = threading.Lock()

    def __call__(self, operation: str, size: int = 0, **arguments: Any) -> dict[str, Any]:
        with self.lock:
            self.calls.append(operation)
            number = self.calls.count(operation)
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            self.before(operation, number)
            with self.lock:
                answer = self.serve(operation, size, **arguments)
            self.after(operation, number)
            return answer
        finally:
            with self.lock:
                self.at_once -= 1

    def serve(self, operation: str, size: int, **arguments: Any) -> dict[str, Any]:
        upload = str(arguments.get("UploadId", ""))
        if operation == "head_object":
            if self.published is None:
                raise NotFound("no such object")
            return {"Metadata": {WRITER: self.writer}}
        if operation == "create_multipart_upload":
            name = f"upload-{len(self.writers)}"
            self.uploads[name], self.writers[name] = {}, arguments["Metadata"][WRITER]
            return {"UploadId": name}
        if upload not in self.uploads:
            raise NotFound("no such upload")
        if operation == "upload_part":
            assert len(arguments["Body"]) == size
            self.uploads[upload][arguments["PartNumber"]] = arguments["Body"]
            return {"ETag": f"etag-{arguments['PartNumber']}"}
        parts = self.uploads.pop(upload)
        if operation == "complete_multipart_upload":
            listed = arguments["MultipartUpload"]["Parts"]
            assert listed == [{"PartNumber": n, "ETag": f"etag-{n}"} for n in sorted(parts)]
            self.published, self.writer = b"".join(parts[n] for n in sorted(parts)), self.writers[upload]
        return {}


def upload(server: Server, folder: Path, until: float = MANY, data: bytes = DATA) -> list[int]:
    path = folder / "file"
    path.write_bytes(data)
    sent: list[int] = []
    upload_parts(server, path, len(data), part_bytes=64, concurrency=3, until=until, on_sent=sent.append)
    return sent


def fail(operation: str, *numbers: int, kind: type[Exception] = StorageUnavailable) -> Any:
    def fault(found: str, number: int) -> None:
        if found == operation and number in numbers:
            raise kind(f"{operation} {number}")

    return fault


def test_the_parts_cover_the_file():
    assert parts_of(10, 4) == [Part(1, 0, 4), Part(2, 4, 4), Part(3, 8, 2)]
    assert parts_of(8, 4) == [Part(1, 0, 4), Part(2, 4, 4)]
    size = 1_000_001
    assert len(parts_of(size, 10)) <= 10_000
    assert sum(part.length for part in parts_of(size, 10)) == size


def test_a_file_arrives_as_it_is(tmp_path: Path):
    server = Server()
    sent = upload(server, tmp_path)
    assert server.published == DATA
    assert sum(sent) == len(DATA)
    assert server.most_at_once <= 3
    assert server.calls.count("upload_part") == 16
    assert server.uploads == {}


@pytest.mark.parametrize("operation", ["create_multipart_upload", "upload_part", "complete_multipart_upload"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_request_that_fails_or_whose_answer_is_lost_is_sent_again(tmp_path: Path, operation: str, when: str):
    server = Server(**{when: fail(operation, 1, 2)})
    upload(server, tmp_path)
    assert server.published == DATA
    assert server.calls.count("upload_part") <= 18


def test_what_stays_away_is_told_and_leaves_nothing(tmp_path: Path):
    server = Server(before=fail("upload_part", *range(1, 1000)))
    with pytest.raises(StorageUnavailable, match="upload_part"):
        upload(server, tmp_path, until=0.0)
    assert (server.published, server.uploads) == (None, {})


def test_a_failure_that_is_final_ends_the_other_parts(tmp_path: Path):
    def fault(operation: str, number: int) -> None:
        if operation == "upload_part":
            raise ConfigError("refused") if number == 5 else StorageUnavailable("away")

    server = Server(before=fault)
    with pytest.raises(ConfigError, match="refused"):
        upload(server, tmp_path)
    assert (server.published, server.uploads) == (None, {})


def test_an_upload_that_was_removed_is_worth_another_try(tmp_path: Path):
    server = Server()

    def remove(operation: str, number: int) -> None:
        if operation == "upload_part" and number == 4:
            server.uploads.clear()

    server.before = remove
    with pytest.raises(StorageUnavailable, match="unfinished upload disappeared"):
        upload(server, tmp_path)
    server.before = lambda *_: None
    upload(server, tmp_path)
    assert server.published == DATA


def test_the_object_of_another_writer_is_not_taken_for_ours(tmp_path: Path):
    server = Server()

    def another(operation: str, number: int) -> None:
        if operation == "complete_multipart_upload":
            server.uploads.clear()
            server.published, server.writer = b"theirs", "another"

    server.before = another
    with pytest.raises(StorageUnavailable):
        upload(server, tmp_path)
    assert server.published == b"theirs"
