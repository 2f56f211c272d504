"""From a YAML file to a validated tree, and every fault on the way."""

from pathlib import Path

import pytest

from headrace.config import Part, execution, identity, identity_document, load_document, merge, walk
from headrace.config_check import parse
from headrace.errors import ConfigError


class Inner(Part):
    rate: float = identity(0.1, description="a rate", gt=0)
    workers: int = execution(1, description="processes")


class Item(Part):
    path: str = identity(description="a path")


class Outer(Part):
    name: str = identity(description="the name")
    inner: Inner = Inner()
    items: tuple[Item, ...] = identity((), description="items")


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_a_child_is_laid_over_its_parent_key_by_key(tmp_path: Path) -> None:
    write(tmp_path, "base.yaml", "name: base\ninner: {rate: 0.5, workers: 4}\n")
    child = write(tmp_path, "child.yaml", "extends: base.yaml\ninner: {rate: 0.25}\n")
    assert load_document(child) == {"name": "base", "inner": {"rate": 0.25, "workers": 4}}


def test_lists_are_replaced_not_joined() -> None:
    assert merge({"a": [1, 2], "b": {"c": 1}}, {"a": [3], "b": {"d": 2}}) == {"a": [3], "b": {"c": 1, "d": 2}}


def test_overrides_reach_sections_lists_and_new_keys(tmp_path: Path) -> None:
    path = write(tmp_path, "c.yaml", "name: x\nitems: [{path: a}, {path: b}]\n")
    document = load_document(path, ("inner.rate=1e-3", "items.1.path=z", "name=true-name"))
    assert document == {"name": "true-name", "inner": {"rate": "1e-3"}, "items": [{"path": "a"}, {"path": "z"}]}
    assert parse(Outer, document).inner.rate == 1e-3


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("inner.rate", "--set takes KEY=VALUE"),
        ("=1", "--set takes KEY=VALUE"),
        ("inner..rate=1", "--set takes KEY=VALUE"),
        ("name.x=1", "name is the value 'x', not a section"),
        ("items.7.path=a", "'7' must be an index from 0 to 0"),
        ("inner.rate=[1", "is not valid YAML"),
    ],
)
def test_a_malformed_override_is_refused(tmp_path: Path, override: str, sentence: str) -> None:
    path = write(tmp_path, "c.yaml", "name: x\nitems: [{path: a}]\n")
    with pytest.raises(ConfigError) as caught:
        load_document(path, (override,))
    assert sentence in str(caught.value)


def test_a_circle_of_parents_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "a.yaml", "extends: b.yaml\n")
    write(tmp_path, "b.yaml", "extends: a.yaml\n")
    with pytest.raises(ConfigError, match="goes round in a circle"):
        load_document(tmp_path / "a.yaml")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("name: [", "is not valid YAML"),
        ("- a\n- b\n", "must hold a mapping of sections, got a list"),
        ("name: x\nname: y\n", "'name' is written twice"),
        ("name: !!python/object/apply:os.system ['true']\n", "is not valid YAML"),
        ("extends: [a, b]\n", "must be the path of one YAML file"),
    ],
)
def test_a_bad_file_is_one_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_document(write(tmp_path, "c.yaml", text))
    assert sentence in str(caught.value)


def test_a_missing_file_names_the_command_that_writes_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"does not exist; `headrace init DATA > gone\.yaml` writes one"):
        load_document(tmp_path / "gone.yaml")


@pytest.mark.parametrize(
    ("document", "sentence"),
    [
        ({"name": "x", "inner": {"raet": 1}}, "Unknown key 'inner.raet'; the nearest key there is 'rate'"),
        ({"name": "x", "rate": 1}, "Unknown key 'rate'; did you mean 'inner.rate'?"),
        ({"name": "x", "inner": {"workers": "two"}}, "inner.workers must be a whole number, got 'two'"),
        ({"name": "x", "inner": {"workers": "1e3"}}, "inner.workers must be a whole number, got '1e3'; write 1000"),
        ({"name": "x", "inner": {"workers": True}}, "inner.workers must be a whole number, got True"),
        ({"name": "x", "inner": {"rate": True}}, "inner.rate must be a number, got True"),
        ({"name": "x", "inner": {"rate": -1}}, "inner.rate must be greater than 0, got -1"),
        ({"name": "x", "inner": {"rate": float("inf")}}, "inner.rate must be a finite number, got inf"),
        ({}, "name is required: the name"),
        (
            {"name": "x", "items": [{"pth": "a", "path": "b"}]},
            "Unknown key 'items.0.pth'; the nearest key there is 'path'",
        ),
    ],
)
def test_a_wrong_document_names_key_value_and_way_out(document: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(Outer, document)
    assert sentence in str(caught.value)


def test_a_fault_of_yaml_is_one_line_with_its_place(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_document(write(tmp_path, "c.yaml", "name: x\ninner: {rate: 1\nitems: []\n"))
    assert (
        str(caught.value)
        == f"{tmp_path / 'c.yaml'} is not valid YAML: line 3, column 6: expected ',' or '}}', but got ':'"
    )


def test_a_folder_is_not_a_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: Is a directory; give a YAML file"):
        load_document(tmp_path)


def test_every_fault_is_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        parse(Outer, {"inner": {"raet": 1, "workers": "two"}})
    assert len(str(caught.value).splitlines()) == 3


def test_identity_leaves_execution_out() -> None:
    slow = Outer(name="x", inner=Inner(workers=1), items=(Item(path="a"),))
    fast = Outer(name="x", inner=Inner(workers=8), items=(Item(path="a"),))
    assert (
        identity_document(slow)
        == identity_document(fast)
        == {"name": "x", "inner": {"rate": 0.1}, "items": [{"path": "a"}]}
    )


def test_walk_names_every_leaf_once() -> None:
    assert [".".join(path) for path, _ in walk(Outer)] == ["name", "inner.rate", "inner.workers", "items", "items.path"]
