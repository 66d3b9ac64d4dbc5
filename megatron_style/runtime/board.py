"""TensorBoard as a function of `metrics.jsonl`: whoever starts, or starts again, writes all of it anew.

So nothing stands there twice, and nothing is lost that a killed run had not flushed. Points stand against the step in
`tensorboard/` and against the trained tokens in `tensorboard/by_tokens/`. A point's time is the training time, counted
on over resumptions.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event as FileEvent
from tensorboard.compat.proto.event_pb2 import SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from torch.utils.tensorboard.summary import hparams, text
from torch.utils.tensorboard.writer import FileWriter

from megatron_style.config.events import Event

_TAGS = {
    "train": {
        "loss": "train/loss",
        "tokens": "train/tokens",
        "grad_norm": "optimizer/grad_norm",
        "learning_rate": "optimizer/learning_rate",
        "skipped": "optimizer/skipped",
        "stage": "stage/index",
        "stage_seconds": "stage/seconds",
        "tokens_per_second": "speed/tokens_per_second",
        "flops_per_second": "speed/flops_per_second",
        "seconds": "speed/seconds",
        "flops": "speed/flops",
        "memory_bytes": "memory/peak_bytes",
    },
    "valid": {"loss": "valid/loss", "perplexity": "valid/perplexity"},
}
_SHAPE = ("segment_length", "cache_length", "rows", "micro_rows", "flops_per_token")  # of a stage, shown all through it
_COMPARED = ("valid/loss", "valid/perplexity", "speed/tokens_per_second")  # beside the settings, in the HPARAMS tab


class Board:
    def __init__(
        self, folder: Path, settings: Mapping[str, Any], texts: Mapping[str, str], kept: Sequence[Event]
    ) -> None:
        """`settings` are compared between runs, `texts` are shown; `kept` was recorded before this launch."""
        self._by_step, self._by_tokens = _empty(folder), _empty(folder / "by_tokens")
        self._seconds = 0.0
        self._began = time.time() - max((event.get("seconds", 0.0) for event in kept), default=0.0)
        self._shape: dict[str, float] = {}
        experiment, start, self._end = hparams(flat(settings), dict.fromkeys(_COMPARED))
        for summary in (experiment, start):
            self._by_step.add_summary(summary)
        for tag, told in texts.items():
            self._by_step.add_summary(text(tag, told), 0)
        for event in kept:
            self.add(event)

    def add(self, event: Event) -> None:
        self._seconds = event.get("seconds", self._seconds)
        when = self._began + self._seconds
        if event["kind"] == "stage":
            self._shape = {f"stage/{key}": event[key] for key in _SHAPE if key in event}
            self._by_step.add_summary(text("stage/opens", event.get("opens", "")), event["step"], when)
        if event["kind"] == "sample":
            self._by_step.add_summary(text("valid/sample", _quoted(event)), event["step"], when)
        if points := scalars_of(event) | (self._shape if event["kind"] == "train" else {}):
            summary = Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in points.items()])
            self._by_step.add_summary(summary, event["step"], when)
            self._by_tokens.add_summary(summary, event["tokens"], when)

    def close(self, *, finished: bool) -> None:
        """A run that will go on has not ended its session."""
        if finished:
            self._by_step.add_summary(self._end)
        self._by_step.close()
        self._by_tokens.close()


def _empty(folder: Path) -> FileWriter:
    """A TensorBoard that is open forgets what it has seen from step 0 on: all of it comes again."""
    for old in folder.glob("events.out.tfevents.*"):
        old.unlink()
    writer = FileWriter(str(folder), flush_secs=30)
    writer.add_event(FileEvent(session_log=SessionLog(status=SessionLog.START)), 0)
    return writer


def scalars_of(event: Event) -> dict[str, float]:
    """The points of an event, by tag. Runs of older versions recorded fewer."""
    found = {tag: float(event[key]) for key, tag in _TAGS.get(event["kind"], {}).items() if key in event}
    for band, loss in enumerate(event.get("by_position", ()), start=1):
        found[f"valid_by_position/{band:02d}"] = loss
    return found


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """`model.layers`, `stages.0.steps`: one value each, what is not set left out."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{key}.")
        elif isinstance(value, list) and all(isinstance(item, Mapping) for item in value):
            found |= flat({str(index): item for index, item in enumerate(value)}, f"{prefix}{key}.")
        elif value is not None:
            found[prefix + key] = value if isinstance(value, bool | int | float | str) else str(value)
    return found


def code_block(content: str, language: str) -> str:
    return f"```{language}\n{content.rstrip()}\n```"


def _quoted(event: Event) -> str:
    """As code: what a model writes may look like Markdown."""
    return f"{code_block(event['prompt'], '')}\n\ngoes on:\n\n{code_block(event['text'], '')}"
