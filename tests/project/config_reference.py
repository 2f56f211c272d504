"""Writes the tables of docs/guide.md from the config classes: `make docs`. A test compares the two.

Only the text between the two marker lines is generated; everything around it is written by hand.
"""

import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import annotated_types
from pydantic.fields import FieldInfo

from flows.config import PipelineConfig
from headrace.config import Part, has_default, role_of

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guide.md"
BEGIN = "<!-- the tables below are written by `make docs` from the config classes -->"
END = "<!-- end of the written tables -->"


def render() -> str:
    """Every field of the pipeline's config: one table for each section, in the order of definition."""
    top = [(name, field) for name, field in PipelineConfig.model_fields.items() if role_of(field)]
    parts = [_table("At the top", "", PipelineConfig, top)]
    for name, field in PipelineConfig.model_fields.items():
        if not role_of(field):
            parts.extend(_section(name, field.annotation))
    return "\n".join(parts)


def keys() -> list[str]:
    """Every key as the tables write it: `data.inputs[].path`."""
    return [
        f"{prefix}{name}"
        for prefix, part in _parts("", PipelineConfig)
        for name in part.model_fields
        if role_of(part.model_fields[name])
    ]


def _section(prefix: str, annotation: Any) -> Iterator[str]:
    for path, part in _parts(f"{prefix}.", annotation):
        yield _table(f"`{path.rstrip('.')}`", path, part, list(part.model_fields.items()))


def _parts(prefix: str, annotation: Any) -> Iterator[tuple[str, type[Part]]]:
    part = _part_of(annotation)
    if part is None:
        return
    yield prefix, part
    for name, field in part.model_fields.items():
        is_list = role_of(field) is not None
        yield from _parts(f"{prefix}{name}{'[]' if is_list else ''}.", field.annotation)


def _part_of(annotation: Any) -> type[Part] | None:
    if isinstance(annotation, type):
        return annotation if issubclass(annotation, Part) else None
    return next((part for inner in typing.get_args(annotation) if (part := _part_of(inner))), None)


def _table(title: str, prefix: str, part: type[Part], fields: list[tuple[str, FieldInfo]]) -> str:
    about = (part.__doc__ or "").strip().splitlines()[0] if prefix else "What every run has."
    lines = [f"### {title}", "", about, "", "| key | kind | value | default | meaning |", "|---|---|---|---|---|"]
    lines += [_row(f"{prefix}{name}", field) for name, field in fields if role_of(field)]
    return "\n".join([*lines, ""])


def _row(key: str, field: FieldInfo) -> str:
    default = f"`{_as_yaml(field.default)}`" if has_default(field) else "required"
    meaning = (field.description or "").replace("|", "\\|")
    return f"| `{key}` | {role_of(field)} | {_value(field)} | {default} | {meaning} |"


def _as_yaml(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return "[" + ", ".join(repr(item).replace("'", '"') for item in value) + "]"
    return f"{value:,}".replace(",", "_") if isinstance(value, int) and value >= 10**6 else str(value)


def _value(field: FieldInfo) -> str:
    bounds = [text for constraint in field.metadata if (text := _bound(constraint))]
    return ", ".join([_type(field.annotation), *bounds])


def _bound(constraint: Any) -> str:
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    for name, sign in signs.items():
        if isinstance(constraint, getattr(annotated_types, name.capitalize())):
            return f"{sign} {getattr(constraint, name):,}".replace(",", "_")
    return ""


def _type(annotation: Any) -> str:
    arguments = typing.get_args(annotation)
    if typing.get_origin(annotation) is Literal:
        return " or ".join(f"`{argument}`" for argument in arguments)
    if typing.get_origin(annotation) is tuple:
        return f"list of {_type(arguments[0])}"
    if arguments:
        return " or ".join(_type(argument) for argument in arguments)
    if _part_of(annotation):
        return "section"
    names = {str: "text", int: "integer", float: "number", bool: "true or false", type(None): "null"}
    return names[annotation]


def rewritten(guide: str) -> str:
    """The guide with fresh tables between its markers."""
    before, _, rest = guide.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{render()}\n{END}{after}"


if __name__ == "__main__":
    GUIDE.write_text(rewritten(GUIDE.read_text(encoding="utf-8")), encoding="utf-8")
