"""`metrics.jsonl`, the record of a run: one JSON object per line. Each kind of event is a class here, whose fields are
the keys of its line in the order in which they are written. A value that the run did not record, or that has the wrong
type because someone has edited the file, is None.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, get_type_hints

from megatron_style.base.errors import UserError
from megatron_style.base.json_text import parse_json

_COUNTS = ("tokens", "seconds", "stage_seconds", "skipped", "flops")  # that a resumed run continues


@dataclass(frozen=True, kw_only=True)
class StageEvent:
    """The start of a stage. The totals are those before its first step."""

    KIND: ClassVar = "stage"
    step: int
    index: int | None = None
    segment_length: int | None = None
    cache_length: int | None = None
    rows: int | None = None
    micro_rows: int | None = None
    tokens: int | None = None
    seconds: float | None = None
    flops: int | None = None
    flops_per_token: int | None = None
    opens: str | None = None


@dataclass(frozen=True, kw_only=True)
class TrainEvent:
    KIND: ClassVar = "train"
    step: int
    stage: int | None = None
    loss: float | None = None
    grad_norm: float | None = None
    learning_rate: float | None = None
    skipped: int | None = None
    tokens: int | None = None
    tokens_per_second: float | None = None
    stage_seconds: float | None = None
    seconds: float | None = None
    flops: int | None = None
    flops_per_second: float | None = None
    memory_bytes: int | None = None
    auxiliary: Mapping[str, float] | None = None
    by_source: Mapping[str, float] | None = None  # the loss of each source of a blend
    slowest_rank: int | None = None
    slowest: Mapping[str, float] | None = None  # seconds of a step, by phase
    fastest_rank: int | None = None
    fastest: Mapping[str, float] | None = None


@dataclass(frozen=True, kw_only=True)
class SpikeEvent:
    KIND: ClassVar = "spike"
    step: int
    tokens: int | None = None
    loss: float | None = None
    median: float | None = None
    action: str | None = None


@dataclass(frozen=True, kw_only=True)
class ValidEvent:
    KIND: ClassVar = "valid"
    step: int
    loss: float | None = None
    perplexity: float | None = None
    tokens: int | None = None
    seconds: float | None = None
    flops: int | None = None
    by_position: tuple[float, ...] | None = None
    text_digest: str | None = None
    scored_tokens: int | None = None  # of the held-out text
    name: str | None = None  # of the held-out text, if data.valid has names
    is_main: bool | None = None  # false: another text than the first, by which runs are compared


@dataclass(frozen=True, kw_only=True)
class SampleEvent:
    KIND: ClassVar = "sample"
    step: int
    tokens: int | None = None
    prompt: str | None = None
    text: str | None = None


@dataclass(frozen=True, kw_only=True)
class StageEndEvent:
    KIND: ClassVar = "stage_end"
    step: int
    index: int | None = None
    tokens: int | None = None
    stage_tokens: int | None = None
    stage_seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class SaveEvent:
    """A checkpoint that is complete, recorded at the next step that begins."""

    KIND: ClassVar = "save"
    step: int
    checkpoint: int | None = None  # its step
    tokens: int | None = None
    stall_seconds: float | None = None
    write_seconds: float | None = None


@dataclass(frozen=True)
class UnknownEvent:
    """An event that a newer version has written."""

    step: int
    kind: str


KnownEvent = StageEvent | TrainEvent | SpikeEvent | ValidEvent | SampleEvent | StageEndEvent | SaveEvent
Event = KnownEvent | UnknownEvent
KINDS: Mapping[str, type[KnownEvent]] = {
    kind.KIND: kind for kind in (StageEvent, TrainEvent, SpikeEvent, ValidEvent, SampleEvent, StageEndEvent, SaveEvent)
}


def own_seconds(phases: Mapping[str, float]) -> float:
    """Return the time of the phases in which a rank does not wait for the other data-parallel ranks, except under
    ZeRO 3: what is longer there makes all others wait in the phases that follow."""
    return sum(phases.get(phase, 0.0) for phase in ("data", "forward"))


def read_events(path: Path) -> Iterator[Event]:
    """Yield all events of a record, one in memory at a time. A line that is not an event is an error, except for an
    unfinished last one, which a kill may leave."""
    try:
        with path.open(encoding="utf-8", errors="replace", newline="\n") as lines:
            for number, line in enumerate(lines, start=1):
                if line.endswith("\n"):
                    yield _checked_event(line, f"{path}:{number}")
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}; the record of a run is expected") from None


def _checked_event(line: str, where: str) -> Event:
    event = parse_event(line)
    if event is None:
        held = line[:60].rstrip("\n")
        raise UserError(f"{where}: holds {held!r}; expected an event as a run writes it, with kind and step")
    return event


def parse_event(line: str | bytes, *, needs_sound_counts: bool = False) -> Event | None:
    """Return the event of a line; None if there is none. A resumed run continues the counts of a line, so with
    `needs_sound_counts` a line with a damaged count is no event either."""
    try:
        data = parse_json(line)
    except ValueError:
        return None
    if not isinstance(data, dict) or not isinstance(data.get("kind"), str) or type(data.get("step")) is not int:
        return None
    if needs_sound_counts and not all(_is_sound(data[key]) for key in _COUNTS if key in data):
        return None
    kind = data["kind"]
    step = data["step"]
    if kind not in KINDS:
        return UnknownEvent(step, kind)
    values = {key: read(data[key]) for key, read in _READERS[kind].items() if key in data}
    return KINDS[kind](step=step, **values)


def line_of(event: Event) -> str:
    """Return the event as a line of the record, without the newline. Fields that are None are left out."""
    if isinstance(event, UnknownEvent):
        return json.dumps({"kind": event.kind, "step": event.step})
    values = {field.name: getattr(event, field.name) for field in fields(event)}
    return json.dumps({"kind": event.KIND} | {key: value for key, value in values.items() if value is not None})


def _is_sound(count: object) -> bool:
    return isinstance(count, int | float) and not isinstance(count, bool) and 0 <= count < 2**100


def _number(value: object) -> float | None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        return float(value)
    except OverflowError:  # an integer of hundreds of digits
        return math.inf


def _integer(value: object) -> int | None:
    number = _number(value)
    if number is None or not math.isfinite(number):
        return None
    return value if isinstance(value, int) else int(number)


def _text(value: object) -> str | None:
    return None if value is None else str(value)


def _flag(value: object) -> bool | None:
    return value if isinstance(value, bool) else None


def _numbers(value: object) -> tuple[float, ...] | None:
    if not isinstance(value, list):
        return None
    numbers = map(_number, value)
    return tuple(math.nan if number is None else number for number in numbers)


def _named_numbers(value: object) -> dict[str, float] | None:
    if not isinstance(value, dict):
        return None
    numbers = {name: _number(each) for name, each in value.items()}
    return {name: number for name, number in numbers.items() if number is not None}


_BY_TYPE: Mapping[Any, Callable[[object], Any]] = {
    int | None: _integer,
    float | None: _number,
    str | None: _text,
    bool | None: _flag,
    tuple[float, ...] | None: _numbers,
    Mapping[str, float] | None: _named_numbers,
}


def _readers(kind: type[KnownEvent]) -> dict[str, Callable[[object], Any]]:
    hints = get_type_hints(kind)
    return {field.name: _BY_TYPE[hints[field.name]] for field in fields(kind) if field.name != "step"}


_READERS = {name: _readers(kind) for name, kind in KINDS.items()}
