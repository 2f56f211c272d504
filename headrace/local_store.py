"""Objects as files below a folder, and objects in this process's memory.

A file appears under its name complete or not at all: bytes go to a temporary file in the same folder, are flushed to
the disk, and are then renamed (overwrite) or hard-linked (create-only: the link fails when the name exists, also
between processes). Temporary files have unpredictable names, are opened exclusively, and are hidden from listings.
"""

import contextlib
import errno
import os
import shutil
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from headrace.errors import ConfigError, HeadraceError, NotFound, StorageFull, StorageUnavailable
from headrace.temporary import is_abandoned, is_temporary, new_name

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_NOT_ALLOWED = {errno.EACCES, errno.EPERM, errno.EROFS}
_NOT_A_FOLDER = {errno.ENOTDIR, errno.EEXIST, errno.EISDIR}
_COPY_BYTES = 4 << 20
_FOLDER_TRIES = 8


def explain_os_error(error: OSError, doing: str, path: Path, size: int | None = None) -> HeadraceError:
    """Return the error to raise for a failed file operation: one sentence with the cause and the way out.

    `doing` completes "Cannot ...", for example "write"; `size` is in bytes.
    """
    what = f"Cannot {doing} {path}"
    if error.errno in _FULL:
        amount = "" if size is None else f" ({size:,} bytes)"
        return StorageFull(
            f"{what}{amount}: {os.strerror(error.errno or 0)}. Nothing incomplete was left there; free some space "
            "(or put HEADRACE_HOME or storage.root on a larger disk) and run the same command again."
        )
    if error.errno in _NOT_ALLOWED:
        return ConfigError(f"{what}: {os.strerror(error.errno or 0)}. Check the owner and the rights of this path.")
    if error.errno in _NOT_A_FOLDER:
        return ConfigError(f"{what}: a file lies where a folder is needed, or the reverse. Move it out of the way.")
    if error.errno == errno.ENAMETOOLONG:
        return ConfigError(f"{what}: the name is too long for this file system. Use a shorter root or name.")
    return StorageUnavailable(f"{what}: {error.strerror or error}. Check the disk or the mount.")


@contextlib.contextmanager
def complete_file(path: Path, doing: str, size: int | None = None) -> Iterator[IO[bytes]]:
    """Open a temporary file for writing that becomes `path` at the end of the block, or leaves nothing on an error.

    The content is on the disk before the name appears. Raises what `explain_os_error` returns.
    """
    try:
        with _temporary_file(path) as (temporary, file):
            yield file
            _flush_to_disk(file)
            temporary.replace(path)
            _flush_folder(path.parent)
    except OSError as error:
        raise explain_os_error(error, doing, path, size) from error


class FileStore:
    """Objects as files below `root`. Keys are given checked."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, key: str) -> Path:
        """Return the file of a key."""
        return self.root / key if key else self.root

    def size(self, key: str) -> int:
        """Return the size in bytes. Raises NotFound."""
        path = self.path(key)
        with self._reading(path):
            if not path.is_file():
                # is_file() hides a missing right on the folder; stat() tells.
                path.stat()
                raise NotFound(f"{path} is a folder, not an object.")
            return path.stat().st_size

    def read(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        """Return the bytes from `start`, at most `length` of them. Raises NotFound."""
        path = self.path(key)
        with self._reading(path), path.open("rb") as file:
            file.seek(start)
            return file.read() if length is None else file.read(length)

    def sizes(self, prefix: str) -> dict[str, int]:
        """Return the size of every object below the folder `prefix`, by key."""
        found = {}
        for path in self._walk(self.path(prefix)):
            with contextlib.suppress(FileNotFoundError):  # removed by another process meanwhile
                found[path.relative_to(self.root).as_posix()] = path.stat().st_size
        return found

    def children(self, prefix: str) -> list[str]:
        """Return the names directly below the folder `prefix`. A folder without any object has no name, as on S3."""
        names = []
        for entry in self._scan(self.path(prefix)):
            if entry.is_dir(follow_symlinks=False):
                if next(self._walk(Path(entry.path)), None) is not None:
                    names.append(entry.name)
            elif not is_temporary(entry.name):
                names.append(entry.name)
        return names

    def write(self, key: str, data: bytes) -> None:
        """Write the object, replacing an older one in one step."""
        with self._publishing(key, len(data)) as file:
            file.write(data)

    def create(self, key: str, data: bytes) -> bool:
        """Write the object if there is none; return whether this call made it."""
        path = self.path(key)
        try:
            with _temporary_file(path) as (temporary, file):
                file.write(data)
                _flush_to_disk(file)
                created = _link(temporary, path)
                if created:
                    _flush_folder(path.parent)
                return created
        except OSError as error:
            raise explain_os_error(error, "create", path, len(data)) from error

    def put_file(self, local: Path, key: str) -> None:
        """Copy a local file to the object. Never a hard link: the caller may write into its file again."""
        size = local.stat().st_size
        with self._publishing(key, size) as target, local.open("rb") as source:
            shutil.copyfileobj(source, target, _COPY_BYTES)

    def get_file(self, key: str, local: Path) -> None:
        """Copy the object to a local file, which appears complete. Raises NotFound."""
        path = self.path(key)
        size = self.size(key)
        with self._reading(path), path.open("rb") as source, complete_file(local, "write", size) as target:
            shutil.copyfileobj(source, target, _COPY_BYTES)

    def delete(self, key: str) -> None:
        """Remove the object; a missing one is no error."""
        path = self.path(key)
        try:
            path.unlink(missing_ok=True)
        except NotADirectoryError:
            return
        except OSError as error:
            raise explain_os_error(error, "delete", path) from error

    def delete_prefix(self, prefix: str) -> None:
        """Remove every object below the folder `prefix`, and the folder."""
        path = self.path(prefix)
        try:
            shutil.rmtree(path)
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            raise explain_os_error(error, "delete", path) from error

    def remove_abandoned(self, prefix: str) -> int:
        """Remove the temporary files that ended processes of this machine left below a folder; return how many.

        Those of other users stay: not everywhere can be seen whether their processes run. What cannot be removed costs
        only room.
        """
        removed = 0
        for path in self._files(self.path(prefix)):
            if is_abandoned(path.name):
                with contextlib.suppress(OSError):
                    found = path.lstat()
                    if stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid():
                        path.unlink()
                        removed += 1
        return removed

    def _publishing(self, key: str, size: int) -> contextlib.AbstractContextManager[IO[bytes]]:
        return complete_file(self.path(key), "write", size)

    @contextlib.contextmanager
    def _reading(self, path: Path) -> Iterator[None]:
        try:
            yield
        except (FileNotFoundError, NotADirectoryError) as error:
            raise NotFound(f"{path} does not exist.") from error
        except IsADirectoryError as error:
            raise NotFound(f"{path} is a folder, not an object.") from error
        except OSError as error:
            raise explain_os_error(error, "read", path) from error

    def _scan(self, folder: Path) -> list[os.DirEntry[str]]:
        try:
            with os.scandir(folder) as entries:
                return sorted(entries, key=lambda entry: entry.name)
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise explain_os_error(error, "list", folder) from error

    def _walk(self, folder: Path) -> Iterator[Path]:
        return (path for path in self._files(folder) if not is_temporary(path.name))

    def _files(self, folder: Path) -> Iterator[Path]:
        for entry in self._scan(folder):
            if entry.is_dir(follow_symlinks=False):
                yield from self._files(Path(entry.path))
            else:
                yield Path(entry.path)


class MemoryStore:
    """Objects in a dictionary of this process, for tests. Roots of the same name share their objects."""

    _objects: dict[str, bytes] = {}  # noqa: RUF012 - shared on purpose
    _lock = threading.Lock()

    def __init__(self, root: str) -> None:
        self.root = root

    def size(self, key: str) -> int:
        """Return the size in bytes. Raises NotFound."""
        return len(self.read(key))

    def read(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        """Return the bytes from `start`, at most `length` of them. Raises NotFound."""
        with self._lock:
            data = self._objects.get(self._name(key))
        if data is None:
            raise NotFound(f"{self._name(key)} does not exist.")
        return data[start:] if length is None else data[start : start + length]

    def sizes(self, prefix: str) -> dict[str, int]:
        """Return the size of every object below `prefix`, by key."""
        start = self._name(prefix) + "/" if prefix else self._name("")
        with self._lock:
            found = {name: len(data) for name, data in self._objects.items() if name.startswith(start)}
        return {name.removeprefix(self._name("")): size for name, size in found.items()}

    def children(self, prefix: str) -> list[str]:
        """Return the names directly below `prefix`."""
        skipped = len(prefix) + 1 if prefix else 0
        return sorted({key[skipped:].split("/", 1)[0] for key in self.sizes(prefix)})

    def write(self, key: str, data: bytes) -> None:
        """Write the object, replacing an older one."""
        with self._lock:
            self._objects[self._name(key)] = bytes(data)

    def create(self, key: str, data: bytes) -> bool:
        """Write the object if there is none; return whether this call made it."""
        with self._lock:
            if self._name(key) in self._objects:
                return False
            self._objects[self._name(key)] = bytes(data)
            return True

    def put_file(self, local: Path, key: str) -> None:
        """Copy a local file to the object."""
        self.write(key, local.read_bytes())

    def get_file(self, key: str, local: Path) -> None:
        """Copy the object to a local file, which appears complete. Raises NotFound."""
        data = self.read(key)
        with complete_file(local, "write", len(data)) as file:
            file.write(data)

    def delete(self, key: str) -> None:
        """Remove the object; a missing one is no error."""
        with self._lock:
            self._objects.pop(self._name(key), None)

    def delete_prefix(self, prefix: str) -> None:
        """Remove every object below `prefix`."""
        for key in self.sizes(prefix):
            self.delete(key)

    def _name(self, key: str) -> str:
        return f"{self.root}/{key}"


@contextlib.contextmanager
def _temporary_file(path: Path) -> Iterator[tuple[Path, IO[bytes]]]:
    """Open a new hidden file beside `path`, and remove it at the end if it still has its own name."""
    temporary = path.parent / new_name()
    descriptor = _open_new(temporary)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield temporary, file
    finally:
        temporary.unlink(missing_ok=True)


def _open_new(path: Path) -> int:
    """Open a file that must not exist, making its folder; again when another process removes that meanwhile."""
    for _ in range(_FOLDER_TRIES):
        with contextlib.suppress(FileNotFoundError):
            return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        with contextlib.suppress(FileNotFoundError):
            _make_folder(path.parent)
    raise FileNotFoundError(errno.ENOENT, "the folder is removed again and again", str(path.parent))


def _make_folder(folder: Path) -> None:
    """Make the folder and its missing parents, each entry flushed to the disk."""
    missing = [folder]
    while not missing[-1].parent.exists():
        missing.append(missing[-1].parent)
    for path in reversed(missing):
        path.mkdir(exist_ok=True)
        _flush_folder(path.parent)


def _link(temporary: Path, path: Path) -> bool:
    try:
        os.link(temporary, path, follow_symlinks=False)
    except FileExistsError:
        # A network file system may have made our link and lost the answer; a second name for our file proves it.
        return temporary.stat().st_nlink == 2
    return True


def _flush_to_disk(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
