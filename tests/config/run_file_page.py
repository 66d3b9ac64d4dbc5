"""docs/run_file.md, made from the config classes: `python -m tests.config.run_file_page` writes it.

The meaning of a key is the comment on its line in the class; its example is the value in a shipped run file.
"""

from __future__ import annotations

import inspect
import json
import re
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from megatron_style.config.run import RunConfig
from megatron_style.config.section import DURATION, NAME
from megatron_style.config.yaml_file import read_yaml

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "run_file.md"
RUN_FILES = ROOT / "run_configs"
_INTRODUCTION = """# Every key of a run file

A run file is YAML with these sections; [run_configs.md](run_configs.md) is about the shipped ones.
`--set section.key=value` changes a key for one run, and `train RUN.yaml --print-config` shows all of them as the run
would use them. An unknown key or a value of another type is refused by name. Examples are from the shipped run files.
"""
_PLAIN: Mapping[Any, str] = {bool: "true or false", int: "integer", float: "number", str: "text", Path: "path"}
_BOUNDS: Mapping[type, tuple[str, str]] = {Gt: ("gt", ">"), Ge: ("ge", "≥"), Lt: ("lt", "<"), Le: ("le", "≤")}
_PATTERNS = {
    DURATION: " with a unit: s, m or h",
    f"^{NAME}$": " of letters, digits, `_`, `.`, `+` and `-`",
}
_LARGEST = 10_000  # upper bounds above it only protect from files of strangers


@dataclass(frozen=True)
class Key:
    name: str
    kind: str
    default: str
    meaning: str
    example: str


def page() -> str:
    parts = [_INTRODUCTION]
    for path, section in sections(RunConfig):
        parts.append(f"## {f'`{path}`' if path else 'The top level'}\n")
        if section.__doc__ and path:
            parts.append(f"{inspect.cleandoc(section.__doc__)}\n")
        parts.append("| key | type | default | meaning | example |\n|---|---|---|---|---|")
        rows = (
            f"| `{key.name}` | {key.kind} | {key.default} | {key.meaning} | {key.example} |"
            for key in keys(path, section)
        )
        parts.append("\n".join(rows) + "\n")
    return "\n".join(parts)


def sections(section: type[BaseModel], path: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    """Yield each section with its path, outer ones first."""
    yield path, section
    for name, field in section.model_fields.items():
        if (inner := _section_in(field.annotation)) is not None:
            yield from sections(inner, f"{path}.{name}".lstrip("."))


def keys(path: str, section: type[BaseModel]) -> Iterator[Key]:
    meanings = comments(section)
    for name, field in section.model_fields.items():
        example = _example(f"{path}.{name}".lstrip("."))
        yield Key(name, _cell(_kind(field)), _default(field), _cell(meanings.get(name, "")), example)


def comments(section: type[BaseModel]) -> dict[str, str]:
    """Return the comment on the line of each field."""
    found = {}
    for line in inspect.getsource(section).splitlines():
        if match := re.match(r" {4}(\w+): [^#]*#\s*(.+)", line):
            found[match[1]] = match[2]
    return found


def _section_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    inner = (_section_in(each) for each in get_args(annotation))
    return next((section for section in inner if section is not None), None)


def _kind(field: FieldInfo) -> str:
    return _named(field.annotation) + _limits(field.metadata)


def _named(annotation: Any) -> str:
    origin = get_origin(annotation)
    arguments = [each for each in get_args(annotation) if each is not type(None)]
    if origin is Annotated:
        return _named(arguments[0]) + _limits(arguments[1:])
    if origin is Literal:
        return ", ".join(f"`{each}`" for each in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join(_named(each) for each in arguments)
    if origin is dict:
        return f"mapping of names to {_plural(arguments[1])}"
    if origin is tuple:
        return f"list of {_plural(arguments[0])}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "section"
    return _PLAIN[annotation]


def _plural(annotation: Any) -> str:
    while get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    return f"{_named(annotation)}s"


def _limits(metadata: Any) -> str:
    found = ""
    for each in metadata:
        if (pattern := getattr(each, "pattern", None)) is not None:
            return _PATTERNS[pattern]
        for kind, (attribute, sign) in _BOUNDS.items():
            if isinstance(each, kind) and getattr(each, attribute) < _LARGEST:
                found += f"{',' if found else ''} {sign} {getattr(each, attribute)}"
        found += _limits(getattr(each, "metadata", ()))
    return found


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    if field.default is None or isinstance(field.default, BaseModel):
        return ""
    value = list(field.default) if isinstance(field.default, tuple) else field.default
    return f"`{json.dumps(value)}`"


@cache
def _examples() -> dict[str, object]:
    found: dict[str, object] = {}
    for file in sorted(RUN_FILES.glob("*.yaml")):
        for path, value in _values(read_yaml(file)):
            found.setdefault(path, value)
    return found


def _values(data: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, object]]:
    for name, value in data.items():
        inner = f"{path}.{name}".lstrip(".")
        if isinstance(value, Mapping):
            yield from _values(value, inner)
        elif isinstance(value, list) and value and isinstance(value[0], Mapping):
            for each in value:
                yield from _values(each, inner)
        else:
            yield inner, value


def _example(path: str) -> str:
    return f"`{json.dumps(_examples()[path]).strip(chr(34))}`" if path in _examples() else ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
