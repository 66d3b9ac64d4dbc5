"""The page's charts: their lines, bars and ranges, made from runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from megatron_style.base.units import COUNT, FLOPS, FLOPS_PER_SECOND, MEMORY, NUMBER, PERCENT, RATE, TIME, Quantity
from megatron_style.reporting.bars import Bar, BarChart, Group
from megatron_style.reporting.comparison import StageFigures, stage_figures, stage_spans
from megatron_style.reporting.history import HeldOut, Place, RunHistory
from megatron_style.reporting.scale import padded
from megatron_style.reporting.svg import Chart, ChartAxis, Line, Point, StageBand

Values = Callable[[RunHistory], Sequence[tuple[Place, float | None]]]


@dataclass(frozen=True)
class Along:
    """A quantity that curves are drawn against."""

    key: str
    label: str
    quantity: Quantity
    of: Callable[[Place], float | None]


ALONG = (
    Along("tokens", "tokens", COUNT, lambda place: place.tokens),
    Along("time", "time", TIME, lambda place: place.seconds),
    Along("flops", "FLOPs", FLOPS, lambda place: place.flops),
)


def recorded(along: Along, run: RunHistory) -> bool:
    return along.of(run.end) is not None


def curves(runs: Sequence[RunHistory], along: Along) -> tuple[Chart, ...]:
    """Return the charts of loss, perplexity, learning rate and gradient norm, without those that have no records."""
    bands = _bands(runs, along)
    small_bands = tuple(band for band in bands if band.row is None)  # rows of stages would fill a small chart
    losses = _lines(runs, along, "training", lambda run: [(event.at, event.loss) for event in run.trained])
    losses += _lines(runs, along, "held-out", lambda run: [(event.at, event.loss) for event in run.held_out])
    training = _lines(runs, along, "training", lambda run: [(event.at, event.perplexity) for event in run.trained])
    held_out = _lines(runs, along, "held-out", lambda run: [(event.at, event.perplexity) for event in run.held_out])
    rates = _lines(runs, along, "training", lambda run: [(event.at, event.learning_rate) for event in run.trained])
    norms = _lines(runs, along, "training", lambda run: [(event.at, event.grad_norm) for event in run.trained])
    charts = (
        _chart("loss", "Loss, nats per token", along, losses, _upwards(_range(losses)), bands=bands),
        _chart("perplexity", "Perplexity", along, training + held_out,
               _upwards(_perplexity_range(training, held_out), COUNT, logarithmic=True), bands=bands),
        _chart("rate", "Learning rate", along, rates, _upwards(_range(rates), RATE), bands=small_bands, height=120),
        _chart("norm", "Gradient norm", along, norms, _upwards(_range(norms, positive=True), logarithmic=True),
               bands=small_bands, height=120),
        *_by_name(runs, along, small_bands),
    )  # fmt: skip
    return tuple(chart for chart in charts if chart is not None)


def _by_name(runs: Sequence[RunHistory], along: Along, bands: tuple[StageBand, ...]) -> Iterator[Chart | None]:
    """Yield a small chart of the training loss on each source of a blend, and of each named held-out text's loss."""
    sources = dict.fromkeys(name for run in runs for event in run.trained for name in event.by_source)
    texts = dict.fromkeys(event.name for run in runs for event in run.named)
    for number, name in enumerate(sources):
        lines = _lines(runs, along, "training", partial(_losses_on_source, name))
        title = f"Training loss on {name}, nats per token"
        yield _chart(f"source-{number}", title, along, lines, _upwards(_range(lines)), bands=bands, height=120)
    for number, name in enumerate(texts):
        lines = _lines(runs, along, "held-out", partial(_losses_on_text, name))
        title = f"Held-out loss on {name}, nats per token"
        yield _chart(f"text-{number}", title, along, lines, _upwards(_range(lines)), bands=bands, height=120)


def _losses_on_source(name: str, run: RunHistory) -> list[tuple[Place, float | None]]:
    return [(event.at, event.by_source[name]) for event in run.trained if name in event.by_source]


def _losses_on_text(name: str, run: RunHistory) -> list[tuple[Place, float | None]]:
    return [(event.at, event.loss) for event in run.named if event.name == name]


def by_position(runs: Sequence[RunHistory]) -> Chart | None:
    """Return the chart of each run's last validation and, fainter, of those at the ends of its earlier stages."""
    lines = []
    for number, run in enumerate(runs, start=1):
        lines += [_position_line(run, valid, f"run-{number} faint") for valid in _stage_ends(run)]
        lines += [_position_line(run, valid, f"run-{number} held-out", has_marks=True) for valid in run.held_out[-1:]]
    spread = _range(lines)
    if spread is None:
        return None
    return Chart(
        "position", "Held-out loss, nats per token",
        "Mean loss in equal bands of the position in the segment, of the last validation and of earlier stages' ends.",
        ChartAxis(PERCENT, 0.0, 100.0, "position in the segment"), ChartAxis(NUMBER, *padded(*spread)), tuple(lines),
    )  # fmt: skip


def rank_times(runs: Sequence[RunHistory], along: Along) -> Chart | None:
    """Return the chart of the slowest and the fastest rank's own work per step, of runs with several ranks."""
    slowest = _lines(runs, along, "slowest", lambda run: [(at, slow.seconds) for at, slow, _ in run.rank_times])
    fastest = _lines(runs, along, "fastest", lambda run: [(at, fast.seconds) for at, _, fast in run.rank_times])
    lines = slowest + fastest
    title = "Own work of a rank, seconds per step"
    return _chart("ranks", title, along, lines, _upwards(_range(lines, positive=True), TIME), bands=(), height=120)


def speeds(runs: Sequence[RunHistory]) -> tuple[BarChart, ...]:
    """Return the charts of each stage's speed and memory, where stages of the same segment length form a group."""
    charts = (
        _bar_chart(runs, "speed", "Speed, tokens per second", COUNT, lambda figures: figures.tokens_per_second),
        _bar_chart(runs, "work", "Speed, FLOP/s", FLOPS_PER_SECOND, lambda figures: figures.flops_per_second),
        _bar_chart(runs, "memory", "Peak memory of the first rank", MEMORY, lambda figures: figures.memory_bytes),
    )
    return tuple(chart for chart in charts if chart is not None)


def _chart(
    key: str,
    title: str,
    along: Along,
    lines: tuple[Line, ...],
    y: ChartAxis | None,
    *,
    bands: tuple[StageBand, ...],
    height: int = 220,
) -> Chart | None:
    reach = max((point.x for point in _all_points(lines)), default=0.0)
    if y is None or reach <= 0:
        return None
    about = f"{title} against {along.label}. Lines: {'; '.join(line.name for line in lines)}."
    x = ChartAxis(along.quantity, 0.0, reach, along.label)
    return Chart(f"{key}-by-{along.key}", title, about, x, y, lines, bands, height)


def _upwards(
    values: tuple[float, float] | None, quantity: Quantity = NUMBER, *, logarithmic: bool = False
) -> ChartAxis | None:
    """Return the y axis for values in this range; None if there is no range."""
    if values is None:
        return None
    return ChartAxis(quantity, *padded(*values, logarithmic=logarithmic), logarithmic=logarithmic)


def _lines(runs: Sequence[RunHistory], along: Along, kind: str, values: Values) -> tuple[Line, ...]:
    found = (
        Line(f"{run.name}, {kind}", f"run-{number} {kind}", _points(values(run), along), has_marks=kind == "held-out")
        for number, run in enumerate(runs, start=1)
    )
    return tuple(line for line in found if line.points)


def _points(events: Sequence[tuple[Place, float | None]], along: Along) -> tuple[Point, ...]:
    """Return a point per place that has an x. A value that was not recorded is a gap."""
    return tuple(
        Point(x, math.nan if value is None else value, place.step)
        for place, value in events
        if (x := along.of(place)) is not None
    )


def _all_points(lines: Iterable[Line]) -> Iterator[Point]:
    for line in lines:
        yield from line.points


def _bands(runs: Sequence[RunHistory], along: Along) -> tuple[StageBand, ...]:
    """Return the bands of the stages: over the full height if they are the same in all runs, else a row per run."""
    shared = len({_stage_bounds(run, along) for run in runs}) == 1
    bands = []
    for number, run in enumerate(runs[:1] if shared else runs, start=1):
        for index, (low, high, label) in enumerate(_stage_bounds(run, along)):
            style = f"run-{number} {('even', 'odd')[index % 2]}"
            bands.append(StageBand(low, high, label, style, row=None if shared else number - 1))
    return tuple(bands)


def _stage_bounds(run: RunHistory, along: Along) -> tuple[tuple[float, float, str], ...]:
    bounds = ((along.of(begin), along.of(end), stage.label)
              for stage, (begin, end) in zip(run.stages, stage_spans(run), strict=True))  # fmt: skip
    return tuple((low, high, label) for low, high, label in bounds if low is not None and high is not None)


def _range(lines: Iterable[Line], *, positive: bool = False) -> tuple[float, float] | None:
    values = [point.y for point in _all_points(lines) if math.isfinite(point.y)]
    values = [value for value in values if value > 0 or not positive]
    return (min(values), max(values)) if values else None


def _perplexity_range(training: tuple[Line, ...], held_out: tuple[Line, ...]) -> tuple[float, float] | None:
    """Return the range from the lowest value to the highest held-out one: the first training steps would flatten the
    rest."""
    both = _range(training + held_out, positive=True)
    upper = _range(held_out, positive=True)
    if both is None or upper is None or upper[0] == upper[1]:
        return both
    return both[0], upper[1]


def _stage_ends(run: RunHistory) -> list[HeldOut]:
    """Return the last validation of each stage but the last."""
    ends = []
    for stage in run.stages[1:]:
        before = [valid for valid in run.held_out if valid.at.step < stage.before.step]
        ends += before[-1:]
    return ends


def _position_line(run: RunHistory, valid: HeldOut, style: str, *, has_marks: bool = False) -> Line:
    share = 100.0 / max(1, len(valid.by_position))
    points = (Point((index + 0.5) * share, loss, valid.at.step) for index, loss in enumerate(valid.by_position))
    return Line(f"{run.name}, step {valid.at.step}", style, tuple(points), has_marks)


def _bar_chart(
    runs: Sequence[RunHistory],
    key: str,
    title: str,
    quantity: Quantity,
    value: Callable[[StageFigures], float | None],
) -> BarChart | None:
    known = []
    for number, run in enumerate(runs, start=1):
        for figures in stage_figures(run):
            amount = value(figures)
            if amount is not None and math.isfinite(amount):
                known.append((figures, Bar(run.name, f"run-{number}", amount)))
    if not known:
        return None
    bars: dict[str, list[Bar]] = {}
    for figures, bar in sorted(known, key=lambda pair: pair[0].segment_length or 0):  # stable: runs keep their order
        bars.setdefault(figures.label, []).append(bar)
    groups = tuple(Group(label, tuple(group)) for label, group in bars.items())
    about = "; ".join(_in_words(group, quantity) for group in groups)
    return BarChart(key, title, about, quantity, groups)


def _in_words(group: Group, quantity: Quantity) -> str:
    return "; ".join(f"{bar.name}, {group.label}: {quantity.text(bar.value)}" for bar in group.bars)
