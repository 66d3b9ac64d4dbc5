"""A run's folder, read into frozen values. A value that a run did not record is None, never an error."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from megatron_style.base.errors import UserError
from megatron_style.base.events import (
    SampleEvent,
    SaveEvent,
    StageEvent,
    TrainEvent,
    ValidEvent,
    own_seconds,
    read_events,
)
from megatron_style.base.run_folder import RunFolder
from megatron_style.config.yaml_file import read_yaml
from megatron_style.reporting.facts import Facts, read_facts, short_names

_MOST_TRAINED = 20_000  # steps that are kept of a run: more than a page has pixels
_LARGEST = 1e200  # what is larger counts as infinite, so that an axis can have room beyond it


@dataclass(frozen=True)
class Place:
    """A point of training: the totals up to there."""

    step: int
    tokens: float | None = None
    seconds: float | None = None
    flops: float | None = None


@dataclass(frozen=True)
class StageOpening:
    before: Place  # the totals before its first step
    segment_length: int | None
    cache_length: int | None

    @property
    def label(self) -> str:
        return "L=?" if self.segment_length is None else f"L={self.segment_length}"


@dataclass(frozen=True)
class RankTime:
    """The seconds of a rank's own work per step, without waiting for others."""

    rank: int
    seconds: float


@dataclass(frozen=True)
class Trained:
    at: Place
    loss: float | None
    grad_norm: float | None
    learning_rate: float | None
    tokens_per_second: float | None
    stage_seconds: float | None
    memory_bytes: float | None
    by_source: Mapping[str, float]  # losses of the sources of a blend
    slowest: RankTime | None = None
    fastest: RankTime | None = None

    @property
    def perplexity(self) -> float | None:
        return _perplexity(self.loss)


@dataclass(frozen=True)
class HeldOut:
    at: Place
    loss: float | None
    perplexity: float | None
    by_position: tuple[float, ...]
    text_digest: str = ""  # of what the loss was measured on; empty: not recorded
    name: str = ""  # of the text, if it has one
    scored_tokens: float | None = None

    @property
    def is_finite(self) -> bool:
        return self.loss is not None and math.isfinite(self.loss)


@dataclass(frozen=True)
class Sample:
    at: Place
    prompt: str
    text: str


@dataclass(frozen=True)
class Save:
    """The seconds of a checkpoint."""

    stall: float  # that training waited for it
    write: float  # until it was complete


@dataclass(frozen=True)
class RunHistory:
    name: str
    run_file: str
    settings: tuple[tuple[str, str], ...]  # the run file, one value per key: ("model.layers", "4")
    stages: tuple[StageOpening, ...]
    trained: tuple[Trained, ...]
    held_out: tuple[HeldOut, ...]  # on the main text
    samples: tuple[Sample, ...]
    named: tuple[HeldOut, ...] = ()  # on all texts that have a name
    saves: tuple[Save, ...] = ()
    facts: Facts = field(default_factory=Facts)

    @property
    def text_digest(self) -> str:
        """Return the digest of the text of its last validation; empty if it was not recorded."""
        return self.held_out[-1].text_digest if self.held_out else ""

    @property
    def rank_times(self) -> tuple[tuple[Place, RankTime, RankTime], ...]:
        """Return the slowest and the fastest rank, where they were recorded."""
        return tuple(
            (event.at, event.slowest, event.fastest) for event in self.trained if event.slowest and event.fastest
        )

    @property
    def end(self) -> Place:
        """Return the last place. Counts never decrease, so it has the largest of each."""
        places = [Place(0), *(event.at for event in self.trained), *(event.at for event in self.held_out)]
        return Place(
            max(place.step for place in places),
            *(_largest(getattr(place, name) for place in places) for name in ("tokens", "seconds", "flops")),
        )


def read_runs(folders: Sequence[Path]) -> tuple[RunHistory, ...]:
    """Return the runs, each named after its folder. A folder that is given twice is one run."""
    distinct = {folder.resolve(): folder for folder in folders}
    names = short_names(list(distinct))
    return tuple(read_run(name, folder) for name, folder in zip(names, distinct.values(), strict=True))


def read_run(name: str, folder: Path) -> RunHistory:
    metrics = RunFolder(folder).metrics
    run_file = RunFolder(folder).run_file
    for needed in (metrics, run_file):
        if not needed.is_file():
            inside = sorted(path.parent for path in folder.glob(f"*/{needed.name}"))
            such = f", such as {inside[0]}" if inside else ""
            raise UserError(f"{folder}: no {needed.name} in it; the folder of a run is expected{such}")
    stages: list[StageOpening] = []
    trained = _Thinned(every=-(-_count_lines(metrics) // _MOST_TRAINED))
    held_out: list[HeldOut] = []
    samples: list[Sample] = []
    named: list[HeldOut] = []
    saves: list[Save] = []
    for event in read_events(metrics):
        match event:
            case StageEvent():
                trained.end_stage()
                stages.append(_stage(event))
            case TrainEvent():
                trained.add(_trained(event))
            case ValidEvent():
                found = _held_out(event)
                held_out += [found] if event.is_main is not False else []
                named += [found] if found.name else []
            case SampleEvent():
                samples.append(_sample(event))
            case SaveEvent():
                saves.append(Save(_finite(event.stall_seconds) or 0.0, _finite(event.write_seconds) or 0.0))
    trained.end_stage()
    settings = tuple(_flat(read_yaml(run_file)))
    last_step = trained.kept[-1].at.step if trained.kept else 0
    return RunHistory(
        name,
        run_file.read_text(encoding="utf-8"),
        settings,
        stages=tuple(stages),
        trained=tuple(trained.kept),
        held_out=tuple(held_out),
        samples=tuple(samples),
        named=tuple(named),
        saves=tuple(saves),
        facts=read_facts(folder, dict(settings), last_step=last_step),
    )


class _Thinned:
    """Every n-th step of a long run and the last one of each stage, with the peak memory since the one before."""

    def __init__(self, every: int) -> None:
        self.kept: list[Trained] = []
        self._every = every
        self._count = 0
        self._left_out: Trained | None = None  # the newest since the last one that is kept

    def add(self, step: Trained) -> None:
        if self._left_out is not None:
            peak = _largest(iter((self._left_out.memory_bytes, step.memory_bytes)))
            step = replace(step, memory_bytes=peak)
        self._left_out = step
        self._count += 1
        if self._count % self._every == 0:
            self.end_stage()

    def end_stage(self) -> None:
        if self._left_out is not None:
            self.kept.append(self._left_out)
            self._left_out = None


def _count_lines(path: Path) -> int:
    with path.open("rb") as file:
        return max(1, sum(1 for _ in file))


def _place(event: StageEvent | TrainEvent | ValidEvent) -> Place:
    return Place(event.step, *map(_finite, (event.tokens, event.seconds, event.flops)))


def _finite(count: float | None) -> float | None:
    figure = _drawable(count)
    return float(figure) if figure is not None and math.isfinite(figure) else None


def _stage(event: StageEvent) -> StageOpening:
    return StageOpening(_place(event), event.segment_length, event.cache_length)


def _trained(event: TrainEvent) -> Trained:
    return Trained(
        _place(event),
        loss=_drawable(event.loss),
        grad_norm=_drawable(event.grad_norm),
        learning_rate=_drawable(event.learning_rate),
        tokens_per_second=_drawable(event.tokens_per_second),
        stage_seconds=_drawable(event.stage_seconds),
        memory_bytes=_finite(event.memory_bytes),
        by_source={name: _drawable(loss) or 0.0 for name, loss in (event.by_source or {}).items()},
        slowest=_rank_time(event.slowest_rank, event.slowest),
        fastest=_rank_time(event.fastest_rank, event.fastest),
    )


def _rank_time(rank: int | None, phases: Mapping[str, float] | None) -> RankTime | None:
    seconds = None if phases is None else _finite(own_seconds(phases))
    return None if rank is None or seconds is None else RankTime(rank, seconds)


def _held_out(event: ValidEvent) -> HeldOut:
    loss = _drawable(event.loss)
    perplexity = _perplexity(loss) if event.perplexity is None else _drawable(event.perplexity)
    by_position = tuple(_drawable(band) or 0.0 for band in event.by_position or ())
    return HeldOut(
        _place(event),
        loss,
        perplexity,
        by_position,
        event.text_digest or "",
        event.name or "",
        _finite(event.scored_tokens),
    )


def _sample(event: SampleEvent) -> Sample:
    return Sample(Place(event.step, _finite(event.tokens)), event.prompt or "", event.text or "")


def _perplexity(loss: float | None) -> float | None:
    if loss is None:
        return None
    return math.exp(loss) if loss < math.log(_LARGEST) else math.inf


def _drawable(value: float | None) -> float | None:
    """Return a figure that an axis has room beyond: a larger one counts as infinite, a tiny one as zero."""
    if value is None or math.isnan(value):
        return value
    if abs(value) > _LARGEST:
        return math.copysign(math.inf, value)
    return 0.0 if abs(value) < 1 / _LARGEST else value


def _largest(values: Iterator[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _flat(value: object, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield every value of a run file with its path. Null counts as not set."""
    if isinstance(value, dict | list):
        for name, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _flat(inner, f"{key}.{name}" if key else str(name))
    elif value is not None:
        yield key, json.dumps(value) if isinstance(value, bool) else str(value)
