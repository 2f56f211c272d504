"""The base of every config part, and the way from a YAML file to a document; `config_check` validates it.

A *part* is a frozen, closed pydantic model that lies beside the code it configures. Each field says what it is:

- **identity**: it decides what is learned. All identity fields together (with the dataset and the tokenizer) make the
  run key, so another value is another run.
- **execution**: it decides how the same thing is computed (layout, intervals, addresses). It may change between two
  attempts of one run.
- **evaluation**: it decides what is measured. It belongs to the evaluation's own digest and never retrains.
"""

import re
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticKnownError, PydanticUndefined

from headrace.config_rules import Rule
from headrace.errors import ConfigError

Role = Literal["identity", "execution", "evaluation"]
MAX_EXTENDS_DEPTH = 8
NAME_PATTERN = r"^[a-z0-9][a-z0-9._-]*$"
NAME_MAX_LENGTH = 63
NAME_WORDS = f"at most {NAME_MAX_LENGTH} lower case letters, digits, dots, dashes, underscores; a letter or digit first"
"""Names stand in paths, in keys of a store and in databases."""


def _title(name: str) -> str:
    """What a form calls a part: "Data" for DataConfig."""
    words = re.findall(r"[A-Z][a-z]*|[0-9]+", name.removesuffix("Config"))
    return " ".join(words).capitalize()


class Part(BaseModel):
    """One frozen, closed piece of configuration."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        validate_default=True,
        allow_inf_nan=False,
        protected_namespaces=(),
        model_title_generator=lambda model: _title(model.__name__),
    )

    @field_validator("*", mode="before")
    @classmethod
    def _yes_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        """YAML reads `yes` as true, and Python counts that as 1: neither stands for the other here."""
        wanted = cls.model_fields[info.field_name or ""].annotation
        kinds = set(typing.get_args(wanted)) or {wanted}
        if isinstance(value, bool) and bool not in kinds and kinds & {int, float}:
            raise PydanticKnownError("int_type" if int in kinds else "float_type")
        if isinstance(value, int) and not isinstance(value, bool) and kinds == {bool}:
            raise PydanticKnownError("bool_type")
        return value

    @classmethod
    def rules(cls) -> Sequence[Rule]:
        """The rules across its fields."""
        return ()

    @model_validator(mode="after")
    def _keeps_its_rules(self) -> Self:
        """Every broken rule at once, each on a line."""
        faults = [fault for rule in self.rules() if (fault := rule.fault(self))]
        if faults:
            raise ValueError("\n".join(faults))
        return self


def identity(default: Any = ..., *, description: str, **constraints: Any) -> Any:
    """A field that decides what is learned: part of the run key."""
    return _field("identity", default, description, constraints)


def execution(default: Any = ..., *, description: str, **constraints: Any) -> Any:
    """A field that decides how it is computed: may change between attempts of one run."""
    return _field("execution", default, description, constraints)


def evaluation(default: Any = ..., *, description: str, **constraints: Any) -> Any:
    """A field that decides what is measured: part of the evaluation's digest only."""
    return _field("evaluation", default, description, constraints)


def _field(role: Role, default: Any, description: str, constraints: dict[str, Any]) -> Any:
    return Field(default, description=description, json_schema_extra={"role": role}, **constraints)


def role_of(field: FieldInfo) -> Role | None:
    """The role of a leaf field, or None for a field that holds another part."""
    extra = field.json_schema_extra
    if not isinstance(extra, dict):
        return None
    role = extra.get("role")
    return typing.cast("Role | None", role)


def select(part: Part, role: Role) -> dict[str, Any]:
    """The fields of `part` (and of the parts inside it) that have `role`, as plain JSON values."""
    selected: dict[str, Any] = {}
    dumped = part.model_dump(mode="json")
    for name, field in type(part).model_fields.items():
        value = getattr(part, name)
        field_role = role_of(field)
        if field_role is None and isinstance(value, Part):
            inner = select(value, role)
            if inner:
                selected[name] = inner
        elif field_role == role:
            selected[name] = dumped[name]
    return selected


def identity_document(part: Part) -> dict[str, Any]:
    """What decides the result of a run, as plain JSON values: the input of the run key."""
    return select(part, "identity")


def load_document(path: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Read a YAML file, lay it over the file named by `extends`, then apply `a.b=c` overrides.

    Raises ConfigError for a missing file, YAML that is not a mapping, a cycle of `extends`, or a malformed override.
    """
    document = _read_with_parents(path, ())
    for override in overrides:
        _apply_override(document, override)
    return document


def _read_with_parents(path: Path, seen: tuple[Path, ...]) -> dict[str, Any]:
    resolved = path.resolve()
    if resolved in seen or len(seen) >= MAX_EXTENDS_DEPTH:
        chain = " -> ".join(str(p) for p in (*seen, resolved))
        raise ConfigError(f"`extends` goes round in a circle or deeper than {MAX_EXTENDS_DEPTH} files: {chain}")
    document = _read_yaml(path)
    parent = document.pop("extends", None)
    if parent is None:
        return document
    if not isinstance(parent, str):
        raise ConfigError(f"{path}: `extends` must be the path of one YAML file, got {parent!r}")
    base = _read_with_parents(path.parent / parent, (*seen, resolved))
    return merge(base, document)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(
            f"The config file {path} does not exist; `headrace init DATA > {path.name}` writes one"
        ) from None
    except OSError as error:
        raise ConfigError(f"The config file {path} cannot be read: {error.strerror}; give a YAML file") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"The config file {path} is not UTF-8 text (byte {error.start})") from error
    try:
        document = yaml.load(text, Loader=_ClosedLoader)  # noqa: S506 - a SafeLoader
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {yaml_fault(error)}") from error
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise ConfigError(f"{path} must hold a mapping of sections, got a {type(document).__name__}")
    return document


def yaml_fault(error: yaml.YAMLError) -> str:
    """What a YAML library has to say, on one line and with the place."""
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return " ".join(str(error).split())
    return f"line {mark.line + 1}, column {mark.column + 1}: {getattr(error, 'problem', None) or 'not understood'}"


class _ClosedLoader(yaml.SafeLoader):
    """Safe YAML that refuses a key written twice: the second would silently win."""


def _mapping_without_duplicates(loader: yaml.SafeLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    keys = [loader.construct_object(key, deep=True) for key, _ in node.value]
    for key in keys:
        if keys.count(key) > 1:
            line = node.start_mark.line + 1
            raise yaml.YAMLError(f"the key {key!r} is written twice in the mapping that starts at line {line}")
    return loader.construct_mapping(node, deep=True)


_ClosedLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping_without_duplicates)


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` laid on `base`: mappings are merged key by key, everything else is replaced."""
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        merged[key] = merge(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged


def _apply_override(document: dict[str, Any], override: str) -> None:
    name, separator, text = override.partition("=")
    parts = name.split(".")
    if not separator or not all(parts):
        raise ConfigError(
            f"--set takes KEY=VALUE with a dotted key such as optimizer.learning_rate=0.001, got {override!r}"
        )
    try:
        value = yaml.load(text, Loader=_ClosedLoader)  # noqa: S506 - a SafeLoader
    except yaml.YAMLError as error:
        raise ConfigError(f"--set {name}: the value {text!r} is not valid YAML: {yaml_fault(error)}") from error
    target: Any = document
    for depth, part in enumerate(parts[:-1]):
        target = _descend(target, part, ".".join(parts[: depth + 1]), override)
    last = parts[-1]
    if isinstance(target, list):
        target[_index(target, last, override)] = value
    else:
        target[last] = value


def _descend(target: Any, part: str, name: str, override: str) -> Any:
    if isinstance(target, list):
        return target[_index(target, part, override)]
    child = target.setdefault(part, {})
    if child is None:
        child = target[part] = {}
    if not isinstance(child, dict | list):
        raise ConfigError(
            f"--set {override}: {name} is the value {child!r}, not a section, so nothing can be set below it"
        )
    return child


def _index(target: list[Any], part: str, override: str) -> int:
    if not part.isdigit() or int(part) >= len(target):
        raise ConfigError(f"--set {override}: {part!r} must be an index from 0 to {len(target) - 1} of that list")
    return int(part)


def part_inside(annotation: Any) -> type[Part] | None:
    """The part that a field holds, alone, in a list or as one of several types; None for a leaf."""
    if isinstance(annotation, type) and issubclass(annotation, Part):
        return annotation
    if typing.get_origin(annotation) in (tuple, list, typing.Union, types.UnionType):
        for argument in typing.get_args(annotation):
            found = part_inside(argument)
            if found:
                return found
    return None


def walk(model: type[Part], prefix: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], FieldInfo]]:
    """Every leaf field of a tree of parts as (path, field), in the order of definition."""
    leaves: list[tuple[tuple[str, ...], FieldInfo]] = []
    for name, field in model.model_fields.items():
        inner = part_inside(field.annotation)
        if inner is None or role_of(field) is not None:
            leaves.append(((*prefix, name), field))
        if inner is not None:
            leaves.extend(walk(inner, (*prefix, name)))
    return leaves


def has_default(field: FieldInfo) -> bool:
    """Whether a field may be left out of the document."""
    return field.default is not PydanticUndefined or field.default_factory is not None


def to_yaml(part: Part) -> str:
    """The resolved document as YAML, in the order of definition."""
    return yaml.safe_dump(part.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=120)
