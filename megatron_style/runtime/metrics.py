"""`metrics.jsonl`: what a run records, one JSON object a line. TensorBoard and reports are functions of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from megatron_style.config.events import Event


class MetricsFile:
    """Lines are flushed one by one, so a killed run has told everything but perhaps the end of its last line."""

    def __init__(self, path: Path, *, last_step: int) -> None:
        """What was written behind `last_step` is dropped: those steps will be done again."""
        found = [(line, event) for line, event in _whole_events(path) if event["step"] <= last_step]
        self.kept = tuple(event for _, event in found)
        new = path.with_suffix(".new")  # written aside: a kill in between loses nothing
        new.write_text("".join(line + "\n" for line, _ in found), encoding="utf-8")
        new.replace(path)
        self._file = path.open("a", encoding="utf-8")

    def write(self, event: Event) -> None:
        self._file.write(json.dumps(event) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _whole_events(path: Path) -> Iterator[tuple[str, Event]]:
    """Lines as they are, with what they say. The last line of a killed run may be torn, or full of zeros."""
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    for line in text.split("\n")[:-1]:
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict) and {"kind", "step"} <= event.keys():
            yield line, event
