"""Strict, frozen, typed sections, and errors that name the key, its value and what would be right."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from typing import Any, Self, get_args

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from megatron_style.base.errors import UserError

NAME = r"[\w.+-]+"  # a part of TensorBoard's tags
DURATION = r"^\d+(\.\d+)?[smh]$"
PATTERNS: Mapping[str, str] = {
    DURATION: "a time such as 30m, 90s or 1.5h",
    f"^{NAME}$": "of letters, digits, `_`, `.`, `+` and `-`",
}

# The forms that a value may have; pydantic names them as if they were keys.
_FORMS = ("(path)", "(list)", "(mapping)", "(steps)", "(time)")


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    @classmethod
    def parse(cls, data: object, *, source: str) -> Self:
        """Check plain data (from YAML or JSON) against this section."""
        try:
            text = json.dumps(data, allow_nan=False)
        except (TypeError, ValueError) as error:  # a date, a binary, an infinity, a section inside itself
            raise UserError(f"{source}: holds a value that is not plain: {error}") from None
        try:
            # The JSON reader is strict about types, but accepts a list for a tuple.
            return cls.model_validate_json(text)
        except ValidationError as error:
            # An unknown key comes first: it is often the misspelt name of one that is missing.
            first = min(error.errors(), key=lambda found: found["type"] != "extra_forbidden")
            raise UserError(f"{source}: {_explain(first, cls)}") from None

    def as_data(self) -> dict[str, Any]:
        data: dict[str, Any] = self.model_dump(mode="json")
        return data


def _explain(error: ErrorDetails, section: type[BaseModel]) -> str:
    location = tuple(part for part in error["loc"] if part not in _FORMS)
    key = ".".join(str(part) for part in location)
    value = json.dumps(error["input"]) if not isinstance(error["input"], dict) else "a section"
    match error["type"]:
        case "extra_forbidden":
            return f"{key}: unknown key{_suggestion(location, section)}"
        case "missing":
            return f"{key}: missing; it has no default"
        case "value_error":
            reason = str(error["ctx"]["error"])
            return f"{key}: {reason}" if key else reason
        case "string_pattern_mismatch":
            return f"{key} is {value}, but it should be {PATTERNS[error['ctx']['pattern']]}"
        case _:
            return f"{key} is {value}, but {error['msg'].replace('Input should', 'it should')}"


def _suggestion(location: tuple[int | str, ...], section: type[BaseModel]) -> str:
    known = list(_fields_at(location[:-1], section))
    near = difflib.get_close_matches(str(location[-1]), known, n=1)
    if near:
        return f"; did you mean '{near[0]}'?"
    return f"; known keys: {', '.join(known)}" if known else ""


def _fields_at(path: tuple[int | str, ...], section: type[BaseModel]) -> dict[str, Any]:
    """Return the fields of the section at a path such as ('stages', 0)."""
    for part in path:
        if isinstance(part, int):
            continue
        section = next(_sections_in(section.model_fields[part].annotation))
    return dict(section.model_fields)


def _sections_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the sections in a type such as `tuple[StageConfig, ...]` or `SpikeConfig | None`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _sections_in(inner)


def differences(before: Mapping[str, Any], after: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Return what differs between two sections as plain data, as in `optimizer.weight_decay: 0.1 -> 0.0`."""
    found = []
    for key in sorted({*before, *after}):
        old = before.get(key)
        new = after.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            found += differences(old, new, f"{prefix}{key}.")
        elif old != new:
            found.append(f"{prefix}{key}: {json.dumps(old)} -> {json.dumps(new)}")
    return found
