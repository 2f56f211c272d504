import os
import sysconfig
from pathlib import Path

import pytest

from data_prep.config import InputConfig
from data_prep.sources import discover
from headrace.errors import InputError


def names(path, **options):
    return [file.name for file in discover((InputConfig(path=str(path), **options),))]


def touch(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)


def test_a_folder_gives_relative_names_in_order(tmp_path):
    touch(tmp_path, "b/z.txt", "b/a.txt", "a.txt", "b.txt", "B/c.txt")
    assert names(tmp_path) == ["B/c.txt", "a.txt", "b.txt", "b/a.txt", "b/z.txt"]


def test_hidden_files_and_caches_are_left_out(tmp_path):
    touch(tmp_path, "a.py", ".git/config", ".hidden.py", "__pycache__/a.cpython-311.pyc")
    assert names(tmp_path) == ["a.py"]


def test_include_patterns_are_about_the_file_name_or_with_a_slash_about_the_path(tmp_path):
    touch(tmp_path, "a.py", "a.txt", "docs/b.md", "src/c.md")
    assert names(tmp_path, include=("*.py", "docs/*.md")) == ["a.py", "docs/b.md"]


def test_a_single_file_is_known_by_its_own_name(tmp_path):
    touch(tmp_path, "deep/one.txt")
    assert names(tmp_path / "deep/one.txt") == ["one.txt"]


def test_a_glob_names_files_below_its_fixed_part(tmp_path):
    touch(tmp_path, "2023/a.jsonl", "2024/b.jsonl", "2024/c.txt", "2024/d.jsonl/inside.txt")
    assert names(f"{tmp_path}/20*/*.jsonl") == ["2023/a.jsonl", "2024/b.jsonl"]
    assert names(f"{tmp_path}/**/*.txt") == ["2024/c.txt", "2024/d.jsonl/inside.txt"]


def test_a_file_whose_name_looks_like_a_glob_is_that_file(tmp_path):
    touch(tmp_path, "a[1].txt", "a1.txt")
    assert names(tmp_path / "a[1].txt") == ["a[1].txt"]


def test_file_urls_are_paths_and_other_urls_are_refused(tmp_path):
    touch(tmp_path, "a.txt")
    assert names(f"file://{tmp_path}") == ["a.txt"]
    with pytest.raises(InputError, match=r"'s3://bucket/text' is not on this machine. Copy it to a local folder"):
        names("s3://bucket/text")


def test_links_that_lead_in_a_circle_are_entered_once(tmp_path):
    touch(tmp_path, "a/one.txt", "b/two.txt")
    (tmp_path / "a/up").symlink_to(tmp_path)
    (tmp_path / "b/again").symlink_to(tmp_path / "a")
    (tmp_path / "b/self").symlink_to("self")
    (tmp_path / "b/gone.txt").symlink_to("nowhere")
    assert names(tmp_path) == ["a/one.txt", "b/two.txt"]


def test_formats(tmp_path):
    touch(tmp_path, "a.jsonl", "b.NDJSON", "c.json", "d.txt")
    by_ending = {file.name: (file.format, file.text_field) for file in discover((InputConfig(path=str(tmp_path)),))}
    assert by_ending == {
        "a.jsonl": ("jsonl", "text"),
        "b.NDJSON": ("jsonl", "text"),
        "c.json": ("document", None),
        "d.txt": ("document", None),
    }
    forced = discover((InputConfig(path=str(tmp_path), format="jsonl", text_field="body", include=("d.txt",)),))
    assert [(file.format, file.text_field) for file in forced] == [("jsonl", "body")]
    as_text = discover((InputConfig(path=str(tmp_path), format="source", include=("a.jsonl",)),))
    assert [file.format for file in as_text] == ["document"]


def test_inputs_stay_in_their_order(tmp_path):
    touch(tmp_path, "z/1.txt", "a/2.txt")
    files = discover((InputConfig(path=str(tmp_path / "z")), InputConfig(path=str(tmp_path / "a"))))
    assert [(file.input_index, file.name) for file in files] == [(0, "1.txt"), (1, "2.txt")]


def test_the_standard_library_is_its_own_sources_only():
    files = discover((InputConfig(path="python-stdlib:"),))
    found = {file.name for file in files}
    assert {"json/decoder.py", "os.py"} <= found
    assert all(name.endswith(".py") for name in found)
    assert not any(part in name.split("/") for name in found for part in ("site-packages", "__pycache__"))
    root = Path(sysconfig.get_path("stdlib"))
    assert files[0].path.is_relative_to(root)
    with pytest.raises(InputError, match="the standard library is named 'python-stdlib:'"):
        names("python-stdlib:json")
    with pytest.raises(InputError, match="holds Python sources, but its format is given as jsonl"):
        names("python-stdlib:", format="jsonl")


def test_nothing_found_says_what_was_looked_for(tmp_path):
    touch(tmp_path, "a.txt")
    with pytest.raises(InputError, match=r"does not exist. Give a file, a folder, or a quoted glob"):
        names(tmp_path / "b.txt")
    with pytest.raises(InputError, match=r"No file below '.*' matches '\*.py'. Change `path` or `include`"):
        names(tmp_path, include=("*.py",))
    with pytest.raises(InputError, match=r"No file matches '.*\*.md'. Change `path`"):
        names(f"{tmp_path}/*.md")


def test_an_unreadable_folder_is_refused(tmp_path, monkeypatch):
    touch(tmp_path, "open/a.txt", "closed/b.txt")
    real = os.scandir

    def scandir(path):
        if Path(path).name == "closed":
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr("data_prep.sources.os.scandir", scandir)
    with pytest.raises(InputError, match=r"folder .*/closed cannot be listed: Permission denied. Make it readable"):
        names(tmp_path)


def test_something_else_than_a_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match="pipe is not a regular file"):
        names(tmp_path / "pipe")
    touch(tmp_path, "a.txt")
    assert names(tmp_path) == ["a.txt"]


def test_names_that_are_not_utf8_are_spelled(tmp_path):
    (Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.txt"))).write_text("x")
    assert names(tmp_path) == ["caf\\xe9.txt"]
