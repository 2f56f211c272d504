"""Folders: nothing half-written is ever visible, and every failure of the disk is one clear sentence."""

import errno
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import pytest

from headrace import local_store
from headrace.errors import ConfigError, HeadraceError, NotFound, StorageFull, StorageUnavailable
from headrace.local_store import complete_file
from headrace.storage import Storage
from headrace.temporary import is_abandoned, new_name
from tests.headrace.killed import killed_while_writing


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


@pytest.fixture
def folder(root: Path) -> Storage:
    return Storage.open(root)


def all_files(root: Path) -> list[str]:
    """Every file that really lies there, hidden ones too."""
    return sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if not path.is_dir())


def run_python(script: str) -> None:
    subprocess.run([sys.executable, "-W", "error", "-c", textwrap.dedent(script)], check=True, timeout=120)


def fail(monkeypatch: pytest.MonkeyPatch, function: str, number: int) -> None:
    def raise_error(*args: object, **kwargs: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(f"headrace.local_store.{function}", raise_error)


def test_opening_makes_nothing(folder: Storage, root: Path):
    assert folder.list() == folder.children() == []
    assert not folder.exists("a")
    assert not root.exists()
    folder.write_bytes("a", b"x")
    assert root.exists()


def test_urls_of_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    root = tmp_path / "with space"
    plain = Storage.open("with space")
    assert plain.root_url == f"file://{tmp_path}/with%20space"
    assert Storage.open(plain.root_url).local_path() == root
    assert Storage.open(f"file://localhost{root}".replace(" ", "%20")).local_path("a/b") == root / "a" / "b"
    assert Storage.open("~/x").local_path() == Path.home() / "x"
    plain.write_bytes("a", b"x")
    assert (root / "a").read_bytes() == b"x"
    assert plain.url("a") == f"file://{tmp_path}/with%20space/a"
    for url in ("file://elsewhere/path", "file:///path?x=1", "file:///path#x", "", "a\0b", "file://"):
        with pytest.raises(ConfigError):
            Storage.open(url)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
@pytest.mark.parametrize("operation", ["write", "create", "put_file", "get_file"])
def test_a_full_disk(
    folder: Storage, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, operation: str
):
    folder.write_bytes("a/old", b"12345")
    (tmp_path / "local").write_bytes(b"12345")
    fail(monkeypatch, "_flush_to_disk", number)
    use = {
        "write": lambda: folder.write_bytes("a/old", b"54321"),
        "create": lambda: folder.create("a/new", b"54321"),
        "put_file": lambda: folder.put_file(tmp_path / "local", "a/new"),
        "get_file": lambda: folder.get_file("a/old", tmp_path / "new"),
    }
    where = tmp_path / "new" if operation == "get_file" else root / "a"
    with pytest.raises(StorageFull, match=rf"{where}.* \(5 bytes\): .*free some space") as caught:
        use[operation]()
    assert caught.value.exit_code == 1
    assert not caught.value.retryable
    assert all_files(root) == ["a/old"]
    assert folder.read_bytes("a/old") == b"12345"
    assert not (tmp_path / "new").exists()


def test_a_disk_that_is_really_too_small(root: Path):
    """The kernel refuses a file of more than 100 kB half-way through."""
    run_python(f"""
        import resource, signal
        from headrace.errors import StorageFull
        from headrace.storage import Storage
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        storage = Storage.open({str(root)!r})
        storage.write_bytes("a/small", bytes(1000))
        for use in (storage.write_bytes, storage.create):
            try:
                use("a/large", bytes(200_000))
            except StorageFull as error:
                assert "(200,000 bytes)" in str(error), error
            else:
                raise AssertionError("no error")
    """)
    assert all_files(root) == ["a/small"]


@pytest.mark.parametrize(
    ("number", "kind", "text"),
    [
        (errno.EACCES, ConfigError, "Check the owner and the rights"),
        (errno.EROFS, ConfigError, "Read-only file system"),
        (errno.ENAMETOOLONG, ConfigError, "too long"),
        (errno.EIO, StorageUnavailable, "Check the disk or the mount"),
        (errno.ESTALE, StorageUnavailable, "Check the disk or the mount"),
    ],
)
def test_other_failures_of_the_disk(
    folder: Storage, root: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[HeadraceError], text: str
):
    folder.write_bytes("a", b"x")
    with monkeypatch.context() as patch:
        fail(patch, "_flush_to_disk", number)
        with pytest.raises(kind, match=f"Cannot write {root}/a: .*{text}"):
            folder.write_bytes("a", b"y")
    for function, use, what in [
        ("os.scandir", folder.list, "list"),
        ("Path.open", lambda: folder.read_bytes("a"), "read"),
        ("Path.unlink", lambda: folder.delete("a"), "delete"),
        ("shutil.rmtree", lambda: folder.delete_prefix("a"), "delete"),
    ]:
        with monkeypatch.context() as patch:
            fail(patch, function, number)
            with pytest.raises(kind, match=f"Cannot {what} {root}.*{text}"):
                use()
    assert folder.read_bytes("a") == b"x"


def test_a_file_where_a_folder_is_needed(folder: Storage, root: Path):
    folder.write_bytes("a", b"x")
    for use in (folder.write_bytes, folder.create):
        with pytest.raises(ConfigError, match=f"{root}/a/b: a file lies where a folder is needed"):
            use("a/b", b"y")
        with pytest.raises(ConfigError, match="a file lies where a folder is needed"):
            use("a/b/c", b"y")
    folder.write_bytes("folder/b", b"x")
    with pytest.raises(ConfigError, match="or the reverse"):
        folder.write_bytes("folder", b"y")
    for use in (folder.size, folder.read_bytes):
        with pytest.raises(NotFound, match="is a folder, not an object"):
            use("folder")
    assert all_files(root) == ["a", "folder/b"]


def test_unreadable_folders():
    """As another user than root, for whom rights mean nothing."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        root.chmod(0o755)
        (root / "secret").mkdir()
        (root / "secret" / "file").write_bytes(b"x")
        (root / "secret").chmod(0)
        try:
            run_python(f"""
                import os
                from headrace.errors import ConfigError
                from headrace.storage import Storage
                if os.getuid() == 0:
                    os.setuid(65534)
                storage = Storage.open({name!r})
                for use in (
                    lambda: storage.list(),
                    lambda: storage.children("secret"),
                    lambda: storage.read_bytes("secret/file"),
                    lambda: storage.exists("secret/file"),
                    lambda: storage.write_bytes("secret/new", b"x"),
                    lambda: storage.create("secret/new", b"x"),
                ):
                    try:
                        use()
                    except ConfigError as error:
                        assert "Permission denied. Check the owner and the rights" in str(error), error
                    else:
                        raise AssertionError("no error")
            """)
        finally:
            (root / "secret").chmod(0o755)


def test_temporary_files_are_hidden_and_never_left(folder: Storage, root: Path, monkeypatch: pytest.MonkeyPatch):
    folder.write_bytes("a/b", b"x")
    seen: list[str] = []
    flush = local_store._flush_to_disk
    monkeypatch.setattr(
        local_store,
        "_flush_to_disk",
        lambda file: (flush(file), seen.extend(os.listdir(root / "a"))),  # noqa: PTH208
    )
    monkeypatch.setattr(local_store, "_link", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        folder.create("a/c", b"y")
    (hidden,) = set(seen) - {"b"}
    assert re.fullmatch(r"\.headrace-tmp-[0-9a-f]{16}-\d+-\d+-[0-9a-f]{32}", hidden)
    assert all_files(root) == ["a/b"]
    (root / "a" / hidden).write_bytes(b"left by a killed process")
    (root / "empty" / "below").mkdir(parents=True)
    (root / "temporary").mkdir()
    (root / "temporary" / hidden).write_bytes(b"x")
    assert folder.list() == ["a/b"]
    assert folder.children("a") == ["b"]
    assert folder.children() == ["a"]
    folder.delete_prefix("a")
    assert not (root / "a").exists()


def test_only_what_an_ended_process_of_this_machine_left_is_removed(folder: Storage, root: Path):
    dead = killed_while_writing(root / "a" / "file")
    kept = {
        "of a writer that lives": new_name(),
        "of another machine": f".headrace-tmp-{'0' * 16}-{dead.split('-')[3]}-1-{'0' * 32}",
        "of an older version": f".headrace-tmp-{'0' * 32}",
        "named alike": f"{dead}.txt",
        "an object": "b",
    }
    for name in (dead, *kept.values()):
        for place in (root / "a" / "deep", root / "elsewhere"):
            place.mkdir(parents=True, exist_ok=True)
            (place / name).write_bytes(b"x")
    (root / "a" / "linked").symlink_to(root / "elsewhere")
    (root / "a" / "folder" / dead).mkdir(parents=True)
    (root / "a" / "link").mkdir()
    (root / "a" / "link" / dead).symlink_to(root / "elsewhere" / "b")
    assert folder.remove_abandoned("a") == 2
    assert not (root / "a" / dead).exists()
    assert sorted(os.listdir(root / "a" / "deep")) == sorted(kept.values())  # noqa: PTH208
    assert (root / "elsewhere" / dead).exists(), "below another prefix, and reached by a link"
    assert (root / "a" / "folder" / dead).is_dir()
    assert (root / "a" / "link" / dead).is_symlink()
    assert folder.remove_abandoned("nothing") == 0


def test_a_forked_writer_is_named_by_itself():
    ours = new_name()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, new_name().encode())
        os._exit(0)
    os.waitpid(child, 0)
    theirs = os.read(reading, 200).decode()
    os.close(reading)
    os.close(writing)
    assert theirs.split("-")[3] == str(child)
    assert is_abandoned(theirs)
    assert not is_abandoned(ours)


def test_complete_file(tmp_path: Path):
    path = tmp_path / "new" / "file"
    with complete_file(path, "write") as file:
        file.write(b"content")
        assert not path.exists()
    assert path.read_bytes() == b"content"

    def leave_half() -> None:
        with complete_file(path, "write") as file:
            file.write(b"half of another")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        leave_half()
    assert path.read_bytes() == b"content"
    assert all_files(tmp_path) == ["new/file"]


def test_an_existing_link_is_recognised_as_ours(folder: Storage, root: Path, monkeypatch: pytest.MonkeyPatch):
    """A network file system may make the link and lose the answer; the client's second try then finds it there."""
    link = os.link

    def link_twice(*args: object, **kwargs: object) -> None:
        link(*args, **kwargs)  # type: ignore[arg-type]
        link(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr("headrace.local_store.os.link", link_twice)
    assert folder.create("a", b"x")
    assert all_files(root) == ["a"]


def test_a_file_system_without_links_is_refused(folder: Storage, root: Path, monkeypatch: pytest.MonkeyPatch):
    fail(monkeypatch, "os.link", errno.EPERM)
    with pytest.raises(ConfigError, match="Cannot create"):
        folder.probe_create_only()
    assert all_files(root) == []


def test_symbolic_links_to_folders_are_not_followed(folder: Storage, root: Path, tmp_path: Path):
    folder.write_bytes("a/b", b"x")
    (root / "a" / "loop").symlink_to(root, target_is_directory=True)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "precious").write_bytes(b"x")
    (root / "a" / "out").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    assert "a/b" in folder.list()
    folder.delete_prefix("a")
    assert (tmp_path / "elsewhere" / "precious").exists()


def test_a_folder_that_another_process_removes(folder: Storage, root: Path, monkeypatch: pytest.MonkeyPatch):
    make = local_store._make_folder
    removals = [1, 1]

    def make_then_remove(path: Path) -> None:
        make(path)
        if removals:
            removals.pop()
            path.rmdir()

    monkeypatch.setattr(local_store, "_make_folder", make_then_remove)
    folder.write_bytes("a/b", b"x")
    assert folder.read_bytes("a/b") == b"x"
    removals[:] = [1] * 100
    with pytest.raises(StorageUnavailable, match="removed again and again"):
        folder.write_bytes("c/d", b"x")


def test_one_of_many_processes_wins(folder: Storage, root: Path):
    run_python(f"""
        import multiprocessing
        from headrace.storage import Storage

        def race(start, number):
            folder = Storage.open({str(root)!r})
            for round_number in range(20):
                start.wait()
                if folder.create(f"race/{{round_number}}", bytes([number]) * 100_000):
                    folder.write_bytes(f"won/{{round_number}}-{{number}}", b"")

        context = multiprocessing.get_context("fork")
        start = context.Barrier(6)
        processes = [context.Process(target=race, args=(start, number)) for number in range(6)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
            assert process.exitcode == 0
    """)
    for round_number in range(20):
        data = folder.read_bytes(f"race/{round_number}")
        winners = [name for name in folder.children("won") if name.startswith(f"{round_number}-")]
        assert winners == [f"{round_number}-{data[0]}"]
        assert data == bytes([data[0]]) * 100_000


def test_a_writer_killed_at_any_moment_leaves_whole_objects(root: Path):
    script = textwrap.dedent(f"""
        import itertools
        from headrace.storage import Storage
        storage = Storage.open({str(root)!r})
        for number in itertools.count():
            storage.write_bytes("value", bytes([number % 256]) * 1_000_000)
            storage.create(f"created/{{number}}", bytes([number % 256]) * 1_000_000)
    """)
    folder = Storage.open(root)
    for _ in range(4):
        process = subprocess.Popen([sys.executable, "-c", script])
        already = len(folder.list("created"))
        while len(folder.list("created")) < already + 1 and process.poll() is None:
            time.sleep(0.001 * secrets.randbelow(5))
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        for key in folder.list():
            data = folder.read_bytes(key)
            assert data == data[:1] * 1_000_000
        folder.delete_prefix("created")
