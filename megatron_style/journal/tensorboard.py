"""Write TensorBoard event files from `metrics.jsonl`. A resumed run adds a file; TensorBoard then drops the later steps
of earlier files.

Before each checkpoint all events are flushed, and a mark records it. If the mark does not reach the checkpoint, all
files are rewritten: nothing is duplicated, and nothing is missing that a killed run had not flushed. The x axis is the
step; a second log folder has the same points against the trained tokens, if the run file asks for it. TensorBoard
calls a run by its folder, so files are in one that has the run's name. The time of a point is the training time, over
all resumptions.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event as FileEvent
from tensorboard.compat.proto.event_pb2 import SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from torch.utils.tensorboard.summary import text

from megatron_style.base.errors import harmless
from megatron_style.base.events import (
    Event,
    SampleEvent,
    SaveEvent,
    SpikeEvent,
    StageEndEvent,
    StageEvent,
    TrainEvent,
    UnknownEvent,
    ValidEvent,
)
from megatron_style.base.files import write_atomic
from megatron_style.base.json_text import parse_json
from megatron_style.base.run_folder import RunFolder
from megatron_style.journal.event_file import EventFile
from megatron_style.journal.hparams import Setting, session_end, session_start
from megatron_style.journal.metrics_file import MetricsFile

_MARK = "complete.json"
_FILES = "events.out.tfevents.*"

# TensorBoard shows groups in the order of their names, so losses have the first one.
_TAGS: Mapping[type[Event], Mapping[str, str]] = {
    TrainEvent: {
        "loss": "loss/train",
        "tokens": "progress/tokens",
        "grad_norm": "optimizer/grad_norm",
        "learning_rate": "optimizer/learning_rate",
        "skipped": "optimizer/skipped",
        "stage": "stage/index",
        "stage_seconds": "stage/seconds",
        "tokens_per_second": "speed/tokens_per_second",
        "flops_per_second": "speed/flops_per_second",
        "seconds": "progress/seconds",
        "flops": "progress/flops",
        "slowest_rank": "ranks/slowest",
        "fastest_rank": "ranks/fastest",
    },
    SpikeEvent: {"loss": "spike/loss", "median": "spike/median"},
    ValidEvent: {"loss": "loss/valid", "perplexity": "perplexity/valid"},
    SaveEvent: {"stall_seconds": "save/stall_seconds", "write_seconds": "save/write_seconds"},
    StageEvent: {},
    StageEndEvent: {},
    SampleEvent: {},
    UnknownEvent: {},
}
_SHAPE = ("segment_length", "cache_length", "rows", "micro_rows", "flops_per_token")  # of a stage, shown at every step


@dataclass(frozen=True)
class Opening:
    """What TensorBoard shows of a run apart from its record."""

    name: str
    settings: Mapping[str, Setting]  # compared between runs
    layout: Summary  # of the custom-scalars tab
    texts: Mapping[str, str]


class TensorBoardWriter:
    """The event files of a run, against steps and, with `by_tokens`, also against tokens."""

    def __init__(self, folder: RunFolder, opening: Opening, recorded: MetricsFile, *, by_tokens: bool) -> None:
        """Open the files, in folders of the run's name. `recorded` holds earlier launches."""
        last = recorded.last
        self._mark_file = folder.tensorboard / _MARK
        self._seconds = last.seconds or 0.0 if last else 0.0
        logs = (folder.tensorboard, folder.tensorboard_by_tokens)
        folders = [log / opening.name for log in logs[: 1 + by_tokens]]
        mark = _read_mark(self._mark_file, folders, digest=_digest(opening.texts))
        if mark is not None and last and last.tokens is not None and mark.step >= last.step:
            self._mark = mark
            self._writers = _writers(folders, purge_from=(last.step + 1, last.tokens + 1))
            return
        for log in logs:
            _remove_events(log)
        self._mark = _Mark(0, time.time() - self._seconds, {}, _digest(opening.texts))
        self._writers = _writers(folders)
        for summary in (*session_start(opening.settings), opening.layout):
            self._by_step.add_summary(summary)
        for tag, content in opening.texts.items():
            self._by_step.add_summary(text(tag, content), 0)
        for event in recorded.events():
            self.add(event)

    @property
    def _by_step(self) -> EventFile:
        return self._writers[0]

    def flush(self, step: int) -> None:
        """Flush everything up to a step to the files, and mark it as complete."""
        for writer in self._writers:
            writer.flush()
        self._mark = replace(self._mark, step=step)
        write_atomic(self._mark_file, json.dumps(asdict(self._mark)))

    def add(self, event: Event) -> None:
        if isinstance(event, StageEvent | TrainEvent | ValidEvent) and event.seconds is not None:
            self._seconds = event.seconds
        when = self._mark.began + self._seconds
        if isinstance(event, StageEvent):
            self._mark = replace(self._mark, shape=_points(event, {key: f"stage/{key}" for key in _SHAPE}))
            self._by_step.add_summary(text("stage/opens", event.opens or ""), event.step, when)
        if isinstance(event, SampleEvent):
            self._by_step.add_summary(text("valid/sample", _quoted(event)), event.step, when)
        if isinstance(event, TrainEvent | ValidEvent | SpikeEvent | SaveEvent):
            points = scalars_of(event) | (self._mark.shape if isinstance(event, TrainEvent) else {})
            summary = Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in points.items()])
            self._by_step.add_summary(summary, event.step, when)
            if event.tokens is not None:
                for by_tokens in self._writers[1:]:
                    by_tokens.add_summary(summary, event.tokens, when)

    def close(self, *, finished: bool) -> None:
        """Close the files. The session of a run that will be resumed is not marked as ended."""
        if finished:
            self._by_step.add_summary(session_end())
        for writer in self._writers:
            writer.close()


@dataclass(frozen=True)
class _Mark:
    """The step up to which the event files are complete, and what a resumed run needs to continue them."""

    step: int
    began: float  # the time of day at which a run without pauses would have begun
    shape: dict[str, float]  # of the stage
    digest: str  # of the texts


def _read_mark(file: Path, folders: Sequence[Path], *, digest: str) -> _Mark | None:
    """Return the mark; None if there is none, or if the event files are not those that this launch would write."""
    try:
        mark = _Mark(**parse_json(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
    sound = type(mark.step) is int and type(mark.began) is float and type(mark.shape) is dict
    exist = all(any(folder.glob(_FILES)) for folder in folders)
    return mark if sound and exist and mark.digest == digest else None


def _digest(texts: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(texts, sort_keys=True).encode()).hexdigest()[:16]


def _remove_events(folder: Path) -> None:
    """Remove all event files, also those that were written under another name or by an older version."""
    for old in list(folder.rglob(_FILES)):
        old.unlink()
        if not any(old.parent.iterdir()) and old.parent != folder:
            old.parent.rmdir()


def _writers(folders: Sequence[Path], purge_from: Sequence[int] = (0, 0)) -> tuple[EventFile, ...]:
    return tuple(_writer(folder, purge_from=step) for folder, step in zip(folders, purge_from, strict=False))


def _writer(folder: Path, *, purge_from: int = 0) -> EventFile:
    """Open a new event file. Readers of it, even an open TensorBoard, drop the steps they have seen from there on."""
    newest = max((int(path.name.split(".")[3]) for path in folder.glob(_FILES)), default=0)
    while (
        int(time.time()) == newest
    ):  # files are read in the order of their names, which start with the time in seconds
        time.sleep(0.05)
    writer = EventFile(folder)
    writer.add_event(FileEvent(session_log=SessionLog(status=SessionLog.START)), purge_from)
    return writer


def scalars_of(event: Event) -> dict[str, float]:
    """Return the points of an event by tag. Older versions recorded fewer."""
    if isinstance(event, ValidEvent) and event.name is not None:
        return _scalars_of_text(event, event.name)
    found = _points(event, _TAGS[type(event)])
    if isinstance(event, TrainEvent):
        found |= {f"loss_auxiliary/{name}": loss for name, loss in (event.auxiliary or {}).items()}
        found |= {f"loss/train/{name}": loss for name, loss in (event.by_source or {}).items()}
        found |= {f"ranks/slowest_{phase}": seconds for phase, seconds in (event.slowest or {}).items()}
        found |= {f"ranks/fastest_{phase}": seconds for phase, seconds in (event.fastest or {}).items()}
        found |= {} if event.memory_bytes is None else {"memory/peak_gib": event.memory_bytes / 2**30}
    if isinstance(event, ValidEvent):
        bands = enumerate(event.by_position or (), start=1)
        found |= {f"valid_by_position/{band:02d}": loss for band, loss in bands}
    return found


def _scalars_of_text(event: ValidEvent, name: str) -> dict[str, float]:
    """Return the points of a named held-out text. Those of the main one are also where a single text has them."""
    found = _points(event, {key: f"{tag}/{name}" for key, tag in _TAGS[ValidEvent].items()})
    return found | (scalars_of(replace(event, name=None)) if event.is_main else {})


def _points(event: Event, tags: Mapping[str, str]) -> dict[str, float]:
    """Return the values of these fields by tag, without those that were not recorded."""
    values = {tag: getattr(event, key) for key, tag in tags.items()}
    return {tag: float(value) for tag, value in values.items() if value is not None}


def code_block(content: str, language: str) -> str:
    """Return a Markdown code block that the content cannot end: the fence is longer than any in it, and control
    characters, which the renderer uses as markers, are escaped."""
    fences = re.findall(r"`{3,}", content)
    fence = max((f"{found}`" for found in fences), key=len, default="```")
    return f"{fence}{language}\n{harmless(content).rstrip()}\n{fence}"


def _quoted(event: SampleEvent) -> str:
    """Return a sample as code, because the text of a model may look like Markdown."""
    return f"{code_block(event.prompt or '', '')}\n\ncontinues:\n\n{code_block(event.text or '', '')}"
