"""From a document to a validated tree, or every fault of it in a sentence: key, rule, what was given, the way out."""

import difflib
import functools
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, TypeVar

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from headrace.config import NAME_PATTERN, Part, part_inside, role_of, walk
from headrace.errors import ConfigError

PartT = TypeVar("PartT", bound=Part)
Location = tuple[int | str, ...]

WHOLE_NUMBER = "must be a whole number"
NUMBER = "must be a number"
YES_OR_NO = "must be true or false"
RULES = {
    "int_parsing": WHOLE_NUMBER,
    "int_type": WHOLE_NUMBER,
    "int_from_float": WHOLE_NUMBER,
    "float_parsing": NUMBER,
    "float_type": NUMBER,
    "finite_number": "must be a finite number",
    "bool_parsing": YES_OR_NO,
    "bool_type": YES_OR_NO,
    "string_type": "must be text",
    "string_too_long": "must have at most {max_length} characters",
    "too_short": "must have at least {min_length} of them",
    "too_long": "must have at most {max_length} of them",
    "tuple_type": "must be a list",
    "model_type": "must be a section of keys",
    "model_attributes_type": "must be a section of keys",
    "greater_than": "must be greater than {gt}",
    "greater_than_equal": "must be {ge} or more",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be {le} or less",
    "literal_error": "must be {expected}",
}
"""What each of pydantic's rules asks for; others keep pydantic's own words."""


def parse(model: type[PartT], document: Mapping[str, Any]) -> PartT:
    """Validate a whole document. Raises one ConfigError that lists every fault, each with its key and the way out."""
    try:
        return model.model_validate(document)
    except ValidationError as error:
        details = error.errors()
        faults = [line for fault in details if not _is_echo(fault) for line in explain(model, fault).splitlines()]
        faults += _broken_rules(model, document, [_spoilt(fault) for fault in details if not _is_of_a_rule(fault)])
        raise ConfigError("\n".join(dict.fromkeys(faults))) from None


def _is_echo(fault: ErrorDetails) -> bool:
    """Whether a list is called too short only because pydantic does not count the items whose faults it tells, too."""
    return fault["type"] == "too_short" and len(fault["input"]) >= fault["ctx"]["min_length"]


def _is_of_a_rule(fault: ErrorDetails) -> bool:
    """Whether it is about fields that are valid each for itself."""
    return fault["type"] == "value_error" and isinstance(fault["input"], Mapping)


def _spoilt(fault: ErrorDetails) -> Location:
    """The field that has no valid value; for an unknown key all of its section, where one may be meant by it."""
    return fault["loc"][:-1] if fault["type"] == "extra_forbidden" else fault["loc"]


def _broken_rules(
    model: type[Part], document: Mapping[str, Any], spoilt: list[Location], at: Location = ()
) -> Iterator[str]:
    """What the rules of a tree of parts say of the fields that are valid.

    Pydantic asks a part's rules only when all below the part is valid; people want to know everything at once.
    """
    part = _as_far_as_valid(model, document, spoilt, at)
    for rule in model.rules():
        needed = [(*at, *need.split(".")) for need in rule.needs]
        if not any(_same_or_inside(a, b) or _same_or_inside(b, a) for a in needed for b in spoilt):
            yield from _in_section(at, rule.fault(part) or "").splitlines()
    for name, section in _sections(model):
        if isinstance(below := document.get(name, {}), Mapping):
            yield from _broken_rules(section, below, spoilt, (*at, name))


def _as_far_as_valid(model: type[Part], document: Mapping[str, Any], spoilt: list[Location], at: Location) -> Part:
    """The part with every valid value of the document; the others are left out, or as by default."""
    sections = dict(_sections(model))
    values: dict[str, Any] = {}
    for name in document.keys() & model.model_fields.keys():
        here, given = (*at, name), document[name]
        if name in sections and isinstance(given, Mapping):
            values[name] = _as_far_as_valid(sections[name], given, spoilt, here)
        elif not any(_same_or_inside(place, here) for place in spoilt):
            values[name] = _validator(model, name).validate_python(given)
    return model.model_construct(**values)


@functools.cache
def _validator(model: type[Part], name: str) -> TypeAdapter[Any]:
    """What one field alone accepts; kept, as making one takes longer than a whole document does."""
    field = model.model_fields[name]
    annotated: Any = Annotated[field.annotation, field]
    return TypeAdapter(annotated)


def _sections(model: type[Part]) -> list[tuple[str, type[Part]]]:
    """The fields that are parts themselves."""
    inside = ((name, field, part_inside(field.annotation)) for name, field in model.model_fields.items())
    return [(name, part) for name, field, part in inside if part is not None and role_of(field) is None]


def _same_or_inside(location: Location, other: Location) -> bool:
    return location[: len(other)] == other


def explain(model: type[Part], fault: ErrorDetails) -> str:
    """One fault of a document as one sentence, or the broken rules of a part, each on a line."""
    key = ".".join(str(part) for part in fault["loc"])
    if fault["type"] == "extra_forbidden":
        return f"Unknown key {key!r}; {_nearest(model, fault['loc'])}"
    if fault["type"] == "missing":
        return f"{key} is required: {_description(model, fault['loc'])}"
    message = fault["msg"].removeprefix("Value error, ")
    if _is_of_a_rule(fault):
        return _in_section(fault["loc"], message)
    return f"{key} {_rule(model, fault, message)}, got {_shortened(fault['input'])}{_hint(fault)}"


def _in_section(location: Location, message: str) -> str:
    """The sentences of a part's rules; one that does not begin with a key gets that of the part."""
    key = ".".join(str(part) for part in location)
    return "\n".join(
        line if not key or "." in line.split(" ", 1)[0] else f"{key}: {line[0].lower() + line[1:]}"
        for line in message.splitlines()
    )


def _rule(model: type[Part], fault: ErrorDetails, message: str) -> str:
    kind = fault["type"]
    limits = {name: _limit(value) for name, value in fault.get("ctx", {}).items()}
    if kind == "string_too_short":
        return "must not be empty" if limits["min_length"] == "1" else f"must have {limits['min_length']} characters"
    if kind == "string_pattern_mismatch" and limits["pattern"] == NAME_PATTERN:
        return _name_rule(fault["input"])
    if kind == "string_pattern_mismatch":
        return f"must fit its description ({_description(model, fault['loc'])})"
    if kind in RULES:
        return RULES[kind].format_map(limits)
    return f"is not right: {message[0].lower() + message[1:]}"


def _name_rule(name: str) -> str:
    """What about a name is wrong."""
    if not name:
        return "must not be empty"
    wrong = sorted(set(re.findall(r"[^a-z0-9._-]", name)))
    if wrong:
        held = ", ".join(map(repr, wrong[:8]))
        return f"must hold only lower case letters, digits, dot, dash and underscore, not {held}"
    return "must begin with a lower case letter or a digit"


def _limit(value: Any) -> str:
    """A number as the guide and YAML write it: 2 for 2.0, and 100_000_000."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return f"{value:_}" if isinstance(value, int) and value >= 10**6 else str(value)


def _hint(fault: ErrorDetails) -> str:
    """YAML reads 1e3 as text: say how a whole number is written."""
    given = fault["input"]
    if RULES.get(fault["type"]) != WHOLE_NUMBER or not isinstance(given, str | float):
        return ""
    try:
        number = float(given)
    except ValueError:
        return ""
    return f"; write {int(number)}" if number.is_integer() else ""


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _nearest(model: type[Part], location: tuple[int | str, ...]) -> str:
    wrong = str(location[-1])
    section = _part_at(model, location[:-1])
    here = sorted(section.model_fields) if section else []
    close = difflib.get_close_matches(wrong, here, n=1, cutoff=0.6)
    if close:
        return f"the nearest key there is {close[0]!r}"
    everywhere = [".".join(path) for path, _ in walk(model)]
    same_name = [name for name in everywhere if name.rsplit(".", 1)[-1] == wrong]
    if same_name:
        return f"did you mean {same_name[0]!r}?"
    far = difflib.get_close_matches(wrong, [name.rsplit(".", 1)[-1] for name in everywhere], n=1, cutoff=0.6)
    if far:
        return f"did you mean {next(n for n in everywhere if n.rsplit('.', 1)[-1] == far[0])!r}?"
    return f"the keys there are {', '.join(here)}"


def _description(model: type[Part], location: tuple[int | str, ...]) -> str:
    section = _part_at(model, location[:-1])
    field = section.model_fields.get(str(location[-1])) if section else None
    return field.description if field and field.description else "see docs/guide.md"


def _part_at(model: type[Part], location: tuple[int | str, ...]) -> type[Part] | None:
    current: type[Part] | None = model
    for step in location:
        if current is None:
            return None
        if isinstance(step, int):
            continue  # an index inside a list of parts: the item type was already entered
        field = current.model_fields.get(step)
        current = part_inside(field.annotation) if field else None
    return current
