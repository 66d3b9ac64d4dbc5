"""The steps, tokens, time, speed and memory of each stage of a run."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from megatron_style.reporting.history import Place, RunHistory


@dataclass(frozen=True)
class StageFigures:
    label: str
    segment_length: int | None
    cache_length: int | None
    steps: int
    tokens: float | None
    seconds: float | None
    tokens_per_second: float | None
    flops_per_second: float | None
    memory_bytes: float | None


def stage_spans(run: RunHistory) -> tuple[tuple[Place, Place], ...]:
    """Return for each stage the totals before its first step and after its last."""
    begins = [stage.before for stage in run.stages]
    return tuple(zip(begins, [*begins[1:], run.end], strict=True)) if begins else ()


def stage_figures(run: RunHistory) -> tuple[StageFigures, ...]:
    """Return each stage's figures. Labels of equal segment lengths are numbered: L=128, then L=128 (2)."""
    spans = stage_spans(run)
    labels = [stage.label for stage in run.stages]
    counts = [labels[: index + 1].count(label) for index, label in enumerate(labels)]
    return tuple(
        _figures(run, index, label if count == 1 else f"{label} ({count})", *spans[index])
        for index, (label, count) in enumerate(zip(labels, counts, strict=True))
    )


def _figures(run: RunHistory, index: int, label: str, begin: Place, end: Place) -> StageFigures:
    is_last = index + 1 == len(run.stages)
    inside = [event for event in run.trained if begin.step <= event.at.step and (is_last or event.at.step < end.step)]
    tokens, seconds, flops = (
        _difference(getattr(begin, name), getattr(end, name)) for name in ("tokens", "seconds", "flops")
    )
    if seconds is None:  # older records have the time of the stage only
        seconds = inside[-1].stage_seconds if inside else None
    memory = [event.memory_bytes for event in inside if event.memory_bytes is not None]
    return StageFigures(
        label,
        run.stages[index].segment_length,
        run.stages[index].cache_length,
        steps=max(0, end.step - begin.step + is_last),
        tokens=tokens,
        seconds=seconds,
        tokens_per_second=_rate(tokens, seconds) or _median(event.tokens_per_second for event in inside),
        flops_per_second=_rate(flops, seconds),
        memory_bytes=max(memory, default=None),
    )


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _difference(before: float | None, after: float | None) -> float | None:
    return None if before is None or after is None else max(0.0, after - before)


def _rate(amount: float | None, seconds: float | None) -> float | None:
    return amount / seconds if amount is not None and seconds else None
