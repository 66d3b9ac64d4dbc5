"""`metrics.jsonl`, what a run has recorded, for those who read it: one JSON object a line, each with kind and step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_style.base.errors import UserError
from megatron_style.base.json_text import parse_json

Event = dict[str, Any]


def read_events(path: Path) -> list[Event]:
    try:
        content = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}; the record of a run is expected") from None
    whole = content.split("\n")[:-1]  # the last line of a killed run may be torn
    return [_read_event(line, where=f"{path}:{number}") for number, line in enumerate(whole, start=1)]


def _read_event(line: str, where: str) -> Event:
    try:
        event = parse_json(line)
    except ValueError:
        event = None
    if not isinstance(event, dict) or "kind" not in event or not isinstance(event.get("step"), int):
        raise UserError(f"{where}: holds {line[:60]!r}; expected an event as a run writes it, with kind and step")
    return event
