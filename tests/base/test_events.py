"""The record of a run: one parser, one writer, and a documentation page that lists every event."""

from __future__ import annotations

import json
import math
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from megatron_style.base.errors import UserError
from megatron_style.base.events import (
    KINDS,
    Event,
    SampleEvent,
    StageEndEvent,
    TrainEvent,
    UnknownEvent,
    ValidEvent,
    line_of,
    parse_event,
    read_events,
)
from megatron_style.journal.metrics_file import MetricsFile

PAGE = Path(__file__).parents[2] / "docs" / "watching.md"


def line(**values: Any) -> str:
    return json.dumps({"kind": "train", "step": 3} | values)


@pytest.mark.parametrize(
    "event",
    [
        TrainEvent(step=3, loss=2.5, tokens=2**60 + 1, auxiliary={"memory": 0.5}),
        ValidEvent(step=4, loss=math.inf, by_position=(1.0, 2.5), text_digest=""),
        SampleEvent(step=5, prompt="what", text='is "this"\n'),
        StageEndEvent(step=6, index=0, stage_seconds=0.0),
        UnknownEvent(7, "newer"),
    ],
)
def test_what_is_written_is_read_back(event: Event) -> None:
    assert parse_event(line_of(event)) == event


def test_a_line_has_kind_and_step_first_and_nothing_that_is_none() -> None:
    event = TrainEvent(step=3, tokens=7, loss=2.5)
    assert line_of(event) == '{"kind": "train", "step": 3, "loss": 2.5, "tokens": 7}'


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"loss": "high"}, TrainEvent(step=3)),
        ({"loss": True, "stage": None}, TrainEvent(step=3)),
        ({"loss": 10**400, "stage": 10**400}, TrainEvent(step=3, loss=math.inf)),
        ({"stage": 2.0}, TrainEvent(step=3, stage=2)),
        ({"auxiliary": [1.0]}, TrainEvent(step=3)),
        ({"auxiliary": {"a": 1.0, "b": "x"}}, TrainEvent(step=3, auxiliary={"a": 1.0})),
        ({"added_later": 1}, TrainEvent(step=3)),
        ({"kind": "newer", "loss": "high"}, UnknownEvent(3, "newer")),
        ({"kind": "sample", "text": 5}, SampleEvent(step=3, text="5")),
        ({"kind": "valid", "by_position": 5}, ValidEvent(step=3)),
    ],
)
def test_a_value_that_is_not_of_its_type_is_not_recorded(values: dict[str, Any], expected: Event) -> None:
    assert parse_event(line(**values)) == expected


@pytest.mark.parametrize("torn", ["", "{", "[]", "\0\0", "3", '{"step": 1}', '{"kind": "train"}', line(step="1")])
def test_a_bad_line_is_named_by_a_report_and_skipped_by_a_start(tmp_path: Path, torn: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(f"{line()}\n{torn}\n{line(step=4)}\n")
    with pytest.raises(UserError, match=r"metrics.jsonl:2: holds .* with kind and step"):
        list(read_events(path))
    resumed = MetricsFile(path, last_step=4)
    assert list(resumed.events()) == [TrainEvent(step=3), TrainEvent(step=4)]
    resumed.close()


@pytest.mark.parametrize("count", ["many", -1, 2**100, math.nan, True])
def test_a_run_does_not_resume_from_a_line_with_a_damaged_count(tmp_path: Path, count: object) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(f"{line(seconds=2.0)}\n{line(step=4, seconds=count)}\n")
    assert len(list(read_events(path))) == 2
    resumed = MetricsFile(path, last_step=4)
    assert resumed.last == TrainEvent(step=3, seconds=2.0)
    resumed.close()


def test_the_documentation_lists_every_kind_and_its_keys() -> None:
    table = PAGE.read_text(encoding="utf-8").split("| kind |")[1].split("\n\n")[0]
    listed = {}
    for row in re.findall(r"^\| `.*\|$", table, flags=re.MULTILINE):
        kind, *keys = re.findall(r"`(\w+)`", row.replace("`train` line", "line"))
        listed[kind] = set(keys)
    known = {name: {field.name for field in fields(kind)} - {"step"} for name, kind in KINDS.items()}
    assert listed == known
