"""The form in which Prefect's pages ask for a config: made from the JSON schema, as Prefect makes it."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
from prefect.utilities.callables import parameter_schema

from flows.pretrain_flow import pretrain

SCHEMA: dict[str, Any] = parameter_schema(pretrain).model_dump()
PARTS: dict[str, dict[str, Any]] = SCHEMA["definitions"]
REQUIRED = {
    "PipelineConfig": ["name", "data"],
    "DataConfig": ["name", "inputs"],
    "InputConfig": ["path"],
}
UNIT = (
    r"\b(steps?|tokens?|bytes|sequences?|seconds?|ranks?|processes|machines|saves|attempts|buckets|share|threads|blocks|"
    r"heads|checkpoints|batches|deviations|width|rows|seed|decay|rate|norm|base|added|number)\b"
)


def fields() -> Iterator[tuple[str, dict[str, Any]]]:
    for part, schema in PARTS.items():
        for name, field in schema["properties"].items():
            yield f"{part}.{name}", field


FIELDS = dict(fields())


def is_part(field: dict[str, Any]) -> bool:
    return "$ref" in field or "allOf" in field


def test_the_form_has_every_part():
    assert len(FIELDS) > 60
    assert list(SCHEMA["properties"]) == ["config"]


@pytest.mark.parametrize("part", PARTS)
def test_every_level_refuses_unknown_fields(part):
    assert PARTS[part]["type"] == "object"
    assert PARTS[part]["additionalProperties"] is False


@pytest.mark.parametrize("part", PARTS)
def test_a_box_has_a_title_for_people(part):
    title = PARTS[part]["title"]
    assert re.fullmatch(r"[A-Z][a-z]+( [a-z]+)*", title), f"{title!r} is the name of a class"


@pytest.mark.parametrize("part", PARTS)
def test_what_is_not_required_shows_its_default(part):
    required = PARTS[part].get("required", [])
    assert required == REQUIRED.get(part, [])
    hidden = [name for name, field in PARTS[part]["properties"].items() if "default" not in field]
    assert hidden == required, "a default that is made by a function is not shown, and not sent"


@pytest.mark.parametrize("name", FIELDS)
def test_every_field_has_a_title_and_says_what_it_is(name):
    field = FIELDS[name]
    if is_part(field):
        return
    assert field["title"], name
    assert len(field["description"]) > 10


@pytest.mark.parametrize("name", [name for name, field in FIELDS.items() if not is_part(field)])
def test_a_number_says_its_unit(name):
    kinds = {field.get("type") for field in FIELDS[name].get("anyOf", [FIELDS[name]])}
    if kinds & {"integer", "number"}:
        assert re.search(UNIT, FIELDS[name]["description"]), FIELDS[name]["description"]


@pytest.mark.parametrize("name", FIELDS)
def test_no_field_is_asked_for_as_json(name):
    """Free mappings and unions of several types get a raw editor; a list of fields, a choice and `null or X` do not."""
    field = FIELDS[name]
    assert "oneOf" not in field
    assert "discriminator" not in field
    for choice in field.get("anyOf", [field]):
        assert choice.get("type") != "object"
        assert not isinstance(choice.get("items"), list)
        assert "prefixItems" not in choice
    if "anyOf" in field:
        first, second = field["anyOf"]
        assert second == {"type": "null"}
        assert first["type"] in ("string", "integer", "number")
    if field.get("type") == "array":
        assert field["items"].get("type") == "string" or "$ref" in field["items"]


def test_choices_are_lists():
    choices = {name: field["enum"] for name, field in FIELDS.items() if "enum" in field}
    assert choices["TrainingConfig.precision"] == ["bfloat16", "float32", "float64"]
    assert choices["DataConfig.on_error"] == ["fail", "skip"]


def test_a_secret_has_no_place_in_the_form():
    """Parameters are stored and shown in plain text."""
    assert [name for name in FIELDS if re.search(r"secret|password|credential|api_key|access_key", name)] == []
