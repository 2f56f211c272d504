"""What really lies on the store has the fields that docs/formats.md lists, and no others."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from data_prep.config import DataConfig, InputConfig, TokenizerConfig
from data_prep.prepare import prepare
from headrace.storage import Storage
from tests.project.documented_commands import ROOT

FORMATS = (ROOT / "docs/formats.md").read_text(encoding="utf-8")
KIND_HEADINGS = {"tokenizer": "Tokenizer", "unit": "Unit", "dataset": "Dataset"}


@pytest.fixture(scope="module")
def commits(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Every commit object of one small prepared dataset, by kind."""
    folder = tmp_path_factory.mktemp("formats")
    (folder / "text").mkdir()
    for number in range(40):
        text = " ".join(f"word{(number * 31 + i) % 97}" for i in range(300))
        (folder / "text" / f"{number}.txt").write_text(text, encoding="utf-8")
    store = Storage.open(folder / "store")
    data = DataConfig(name="small", inputs=(InputConfig(path=str(folder / "text")),), processes=1)
    prepare(store, data, TokenizerConfig(vocab_size=300, sample_bytes=2**16), work_dir=folder / "work")
    found: dict[str, list[dict[str, Any]]] = {}
    for path in sorted((folder / "store").rglob("*.json")):
        if path.name in ("COMMIT.json", "manifest.json"):
            document = json.loads(path.read_text(encoding="utf-8"))
            found.setdefault(document["kind"], []).append(document)
    return found


def section(heading: str) -> str:
    return FORMATS.split(f"\n## {heading}\n")[1].split("\n## ")[0]


def names(value: Any) -> Iterator[str]:
    """Every key of a document, at any depth."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield key
            yield from names(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from names(inner)


def test_a_commit_has_the_listed_fields(commits):
    listed = set(re.findall(r"^\| `(\w+)` \|", section("Commit object"), re.MULTILINE))

    assert {key for documents in commits.values() for document in documents for key in document} == listed


@pytest.mark.parametrize("kind", KIND_HEADINGS)
def test_the_body_of_each_kind_has_documented_fields_only(commits, kind: str):
    documented = set(re.findall(r"`(\w+)`", section(KIND_HEADINGS[kind])))
    written = {name for document in commits[kind] for name in names(document["body"])}

    assert written - documented - {"train", "validation"} == set()


def test_the_files_of_a_unit_are_the_listed_ones(commits):
    files = {name for document in commits["unit"] for name in document["files"]}
    shapes = {re.sub(r"\d{6}", "NNNNNN", re.sub(r"^(train|validation)", "<split>", name)) for name in files}

    assert shapes == {"<split>-NNNNNN.tar", "<split>.documents.bin"}
    assert all(f"`{shape}`" in section("Unit") for shape in shapes)


def test_a_dataset_has_no_files_of_its_own(commits):
    (manifest,) = commits["dataset"]

    assert manifest["files"] == {}
    assert len(manifest["body"]["units"]) == len(commits["unit"])
