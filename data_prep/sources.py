"""Which files a dataset is made of: trees of sources, text files and jsonl files on this machine.

A file is known by its *relative name*: its path below the folder (or below the fixed part of the glob) that the input
names. Absolute paths never reach a digest, so a corpus that is copied to another machine keeps its identity.
"""

import errno
import fnmatch
import os
import re
import stat
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from data_prep.config import InputConfig
from headrace.errors import InputError

PYTHON_STDLIB = "python-stdlib:"
EXCLUDED = frozenset({"__pycache__"})
STDLIB_EXCLUDED = EXCLUDED | {"site-packages", "dist-packages"}
JSONL_ENDINGS = (".jsonl", ".ndjson")

FileFormat = Literal["document", "jsonl"]


@dataclass(frozen=True)
class SourceFile:
    """One regular file of one input."""

    input_index: int
    name: str
    """Relative name, parts joined by '/'; unique within the input."""
    path: Path
    size: int
    """Bytes."""
    format: FileFormat
    text_field: str | None
    """Field of a jsonl line that holds the text; None for a file that is one document."""


def discover(inputs: tuple[InputConfig, ...]) -> list[SourceFile]:
    """Return the files of all inputs: in the order of the inputs, then by relative name.

    Raises InputError for a path that does not exist, a folder that cannot be listed, or an input without files.
    """
    files: list[SourceFile] = []
    for index, config in enumerate(inputs):
        found = sorted(_find(config), key=lambda pair: pair[0])
        if not found:
            raise InputError(_nothing_found(config))
        files.extend(_describe(index, config, name, path) for name, path in found)
    return files


def require_text(inputs: tuple[InputConfig, ...]) -> None:
    """Refuse inputs among which one has no file, or of which all files are empty; stops looking as soon as it can.

    Raises InputError as `discover` does.
    """
    empty = True
    for index, config in enumerate(inputs):
        sizes = (_describe(index, config, name, path).size for name, path in _find(config))
        first = next(sizes, None)
        if first is None:
            raise InputError(_nothing_found(config))
        empty = empty and first == 0 and not any(sizes)
    if empty:
        raise InputError(f"Every file of the inputs is empty ({inputs[0].path!r} first). Give text in data.inputs.")


def _find(config: InputConfig) -> Iterator[tuple[str, Path]]:
    if config.path.startswith(PYTHON_STDLIB):
        yield from _find_stdlib(config)
        return
    path = local_path(config.path)
    try:
        is_folder, exists = path.is_dir(), path.exists()
    except OSError as error:
        raise InputError(f"The input {config.path!r} cannot be read: {error.strerror}.") from error
    if is_folder:
        yield from _walk(path, config.include, excluded=EXCLUDED)
    elif exists:
        yield path.name, path
    elif _has_wildcard(config.path):
        yield from _find_glob(path)
    else:
        raise InputError(f"The input {config.path!r} does not exist. Give a file, a folder, or a quoted glob.")


def local_path(text: str) -> Path:
    """Return the local path that `text` names; `file://` and `~` are understood. Raises InputError for other URLs."""
    if text.startswith("file://"):
        text = text.removeprefix("file://")
    elif re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", text):
        raise InputError(f"The input {text!r} is not on this machine. Copy it to a local folder and give that path.")
    return Path(text).expanduser().absolute()


def _find_stdlib(config: InputConfig) -> Iterator[tuple[str, Path]]:
    if config.path != PYTHON_STDLIB:
        raise InputError(f"The input {config.path!r} is not known; the standard library is named {PYTHON_STDLIB!r}.")
    if config.format == "jsonl":
        raise InputError(f"The input {PYTHON_STDLIB!r} holds Python sources, but its format is given as jsonl.")
    root = Path(sysconfig.get_path("stdlib"))
    include = ("*.py",) if config.include == ("*",) else config.include
    for name, path in _walk(root, include, excluded=STDLIB_EXCLUDED):
        if name.endswith(".py"):
            yield name, path


def _walk(root: Path, include: tuple[str, ...], excluded: frozenset[str]) -> Iterator[tuple[str, Path]]:
    """Yield the regular files below `root`; hidden and excluded names are left out, linked folders are entered once."""
    entered: set[tuple[int, int]] = set()
    pending = [(root, "")]
    while pending:
        folder, prefix = pending.pop()
        identity = folder.stat()
        # A link that leads back up, or to a folder already seen, would otherwise repeat its documents without end.
        if (identity.st_dev, identity.st_ino) in entered:
            continue
        entered.add((identity.st_dev, identity.st_ino))
        below = []
        for entry in _entries(folder):
            name = prefix + _text_name(entry.name)
            if entry.name.startswith(".") or entry.name in excluded:
                continue
            mode = _mode(entry)
            if stat.S_ISDIR(mode):
                below.append((Path(entry.path), name + "/"))
            elif stat.S_ISREG(mode) and _included(name, include):
                yield name, Path(entry.path)
        pending.extend(reversed(below))


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: os.fsencode(entry.name))
    except OSError as error:
        raise InputError(f"The folder {folder} cannot be listed: {error.strerror}. Make it readable.") from error


def _mode(entry: os.DirEntry[str]) -> int:
    """The mode of what the entry leads to; 0 for a link that leads nowhere."""
    try:
        return entry.stat().st_mode
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ELOOP):
            return 0
        raise InputError(f"{entry.path} cannot be read: {error.strerror}. Make its folder readable.") from error


def _find_glob(pattern: Path) -> Iterator[tuple[str, Path]]:
    """Yield the files that a glob matches, named below the part of the pattern that has no wildcard."""
    parts = pattern.parts
    first = next(index for index, part in enumerate(parts) if _has_wildcard(part))
    root = Path(*parts[:first])
    for path in root.glob("/".join(parts[first:])):
        if path.is_file():
            yield _text_name(path.relative_to(root).as_posix()), path


def _has_wildcard(text: str) -> bool:
    return any(character in text for character in "*?[")


def _included(name: str, include: tuple[str, ...]) -> bool:
    """A pattern with a slash is about the relative name, one without about the last part of it."""
    last = name.rsplit("/", 1)[-1]
    return any(fnmatch.fnmatchcase(name if "/" in pattern else last, pattern) for pattern in include)


def _text_name(name: str) -> str:
    """File names are bytes; those that are not UTF-8 are spelled with backslashes, so every name can be digested."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def _describe(index: int, config: InputConfig, name: str, path: Path) -> SourceFile:
    try:
        status = path.stat()
    except OSError as error:
        raise InputError(f"The file {path} cannot be read: {error.strerror}.") from error
    if not stat.S_ISREG(status.st_mode):
        raise InputError(f"The input {path} is not a regular file.")
    by_line = config.format == "jsonl" or (config.format == "auto" and name.lower().endswith(JSONL_ENDINGS))
    return SourceFile(
        input_index=index,
        name=name,
        path=path,
        size=status.st_size,
        format="jsonl" if by_line else "document",
        text_field=config.text_field if by_line else None,
    )


def _nothing_found(config: InputConfig) -> str:
    patterns = ", ".join(config.include)
    if config.path.startswith(PYTHON_STDLIB) or Path(config.path.removeprefix("file://")).expanduser().is_dir():
        return f"No file below {config.path!r} matches {patterns!r}. Change `path` or `include` of this input."
    return f"No file matches {config.path!r}. Change `path` of this input."
