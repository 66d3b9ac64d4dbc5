"""`metrics.jsonl`: the record of a run, one JSON object per line. TensorBoard and reports are made from it."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from pathlib import Path

from megatron_style.base.events import Event, TrainEvent, ValidEvent, line_of, parse_event


class MetricsFile:
    """The open file. Lines are flushed one by one, so a killed run has recorded everything but perhaps the end of its
    last line.

    A run may have millions of lines: a resumed run reads from the end, and only what it needs."""

    def __init__(self, path: Path, *, last_step: int) -> None:
        """Open the file, and drop what was written after `last_step`: those steps will be repeated."""
        self._path = path
        self.last: TrainEvent | None = None  # the last that is kept
        if path.exists():
            os.truncate(path, self._end_of(last_step))
        self._file = path.open("ab", buffering=0)

    def write(self, event: Event) -> None:
        end = self._file.seek(0, os.SEEK_END)
        line = line_of(event).encode() + b"\n"
        try:
            while line:  # an almost full disk may accept only a part
                line = line[self._file.write(line) :]
        except OSError:
            self._file.truncate(end)
            if end == 0:
                self._path.unlink()
            raise

    def events(self) -> Iterator[Event]:
        """Yield all recorded events, one in memory at a time; truncated lines are left out."""
        with self._path.open("rb") as file:
            for line in file:
                event = _event(line)
                if event is not None:
                    yield event

    def last_held_out(self, step: int | None = None) -> ValidEvent | None:
        """Return the last evaluation of the main held-out text, or the one after this step."""
        for _, line in _lines_backwards(self._path):
            event = _event(line)
            if isinstance(event, ValidEvent) and event.is_main is not False and step in (None, event.step):
                return event
        return None

    def close(self) -> None:
        self._file.close()

    def _end_of(self, last_step: int) -> int:
        """Return how many bytes to keep. Steps never decrease, so only the end has to be read."""
        kept = 0
        if last_step == 0:
            return kept
        for end, line in _lines_backwards(self._path):
            event = _event(line)
            if event is None or event.step > last_step:
                continue
            kept = max(kept, end)
            if isinstance(event, TrainEvent):
                self.last = event
                break
        return kept


def _lines_backwards(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield complete lines from the last to the first, each with the offset of its end."""
    if path.stat().st_size == 0:
        return
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        end = content.rfind(b"\n") + 1
        while end > 0:
            begin = content.rfind(b"\n", 0, end - 1) + 1
            yield end, content[begin:end]
            end = begin


def _event(line: bytes) -> Event | None:
    """Return the event of a line; None if it is truncated or all zeros, as the last line of a killed run may be."""
    return parse_event(line, needs_sound_counts=True)
