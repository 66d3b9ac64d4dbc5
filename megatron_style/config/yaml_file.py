"""YAML in and out. The only module that imports yaml."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from megatron_style.base.errors import UserError
from megatron_style.base.files import write_atomic
from megatron_style.config.shipped import find_file


class _Loader(yaml.SafeLoader):
    """YAML as people mean it: `1e-4` is a number, and a duplicate key is an error. Aliases are refused: a few lines of
    them can expand to more than any memory holds."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.constructor.ConstructorError(
                None, None, "an alias (*NAME); write the value out", self.get_mark()
            )
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node)
            if not isinstance(key, str | int | float):
                raise yaml.constructor.ConstructorError(None, None, "a key must be a word", key_node.start_mark)
            if key in seen:
                problem = f"duplicate key '{key}'"
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


def read_yaml(path: Path) -> dict[str, Any]:
    try:
        text = find_file(path, "a run file in YAML").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
    try:
        data = yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(data, dict):
        raise UserError(f"{path}: holds {type(data).__name__}, but sections such as `model:` are expected")
    return data


def write_yaml(data: dict[str, Any], path: Path) -> None:
    write_atomic(path, yaml_text(data))


def yaml_text(data: dict[str, Any]) -> str:
    return yaml.safe_dump(data, sort_keys=False)


def override(data: dict[str, Any], setting: str) -> None:
    """Apply one `section.key=value`; list items are named by their index, as in `stages.0.steps=10`."""
    key, equals, text = setting.partition("=")
    if not equals or not all(key.split(".")):
        raise UserError(f"--set {setting}: must be section.key=value, such as --set optimizer.clip_norm=0.25")
    try:
        value = yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, ValueError, RecursionError):
        raise UserError(f"--set {setting}: '{text}' is not a YAML value") from None
    *path, last = key.split(".")
    holder: Any = data
    for part in path:
        holder = _child(holder, part, setting)
    if isinstance(holder, list):
        holder[_index(holder, last, setting)] = value
    else:
        holder[last] = value


def _child(holder: Any, part: str, setting: str) -> Any:
    child = holder[_index(holder, part, setting)] if isinstance(holder, list) else holder.setdefault(part, {})
    if not isinstance(child, dict | list):
        raise UserError(f"--set {setting}: '{part}' holds {child!r}, not a section")
    return child


def _index(items: list[Any], part: str, setting: str) -> int:
    if not part.isdigit() or int(part) >= len(items):
        raise UserError(f"--set {setting}: '{part}' must be an index from 0 to {len(items) - 1}")
    return int(part)
