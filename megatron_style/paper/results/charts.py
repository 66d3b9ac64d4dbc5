"""Charts of the results, as SVG: the same figures give the same file."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

from megatron_style.paper.measures import short
from megatron_style.paper.results.curves import Curve
from megatron_style.paper.results.presented import Presented
from megatron_style.paper.runs import RunSpec

_COLOURS: Mapping[str, str] = {  # of families: each has one colour, and its staged member a thicker line
    "baseline": "#4d4d4d",
    "staged": "#4d4d4d",
    "PIA + cache": "#00499a",
    "Shortformer": "#00499a",
    "Transformer-XL": "#e23413",
    "staged Transformer-XL": "#e23413",
    "Sandwich": "#0f9f6a",
    "Sandwich + Shortformer": "#0f9f6a",
    "Compressive": "#8a4fae",
    "Compressive + Shortformer": "#8a4fae",
    "Routing": "#b07d00",
}
_STAGED = ("staged", "Shortformer")


def draw_table(presented: Presented, path: Path) -> None:
    """Draw a table: as a grid if its rows are first stages of different length and duration, as curves otherwise."""
    if _grid_of(presented):
        _draw_grids(presented, path)
    else:
        _draw_columns(presented, path)


def draw_times(curves: Sequence[Curve], title: str, path: Path) -> None:
    """Draw perplexity against training time. The legend is a ranking: each system with its last perplexity."""
    figure = Figure(figsize=(10, 6), layout="constrained")
    axes = figure.subplots()
    for curve in sorted(curves, key=lambda curve: curve.ys[-1]):
        width = 2.6 if any(word in curve.label for word in _STAGED) else 1.2
        name = f"{curve.label}  {short(curve.ys[-1])}"
        axes.plot(
            curve.xs, curve.ys, "-o", markevery=[-1], label=name, linewidth=width, color=_COLOURS[curve.label]
        )  # fmt: skip
    _perplexity_axis(axes, curves)
    axes.set_xlim(left=0)
    axes.set(xlabel="training time (minutes)", ylabel="held-out perplexity", title=title)
    axes.grid(alpha=0.25, which="both")
    axes.spines[["top", "right"]].set_visible(False)
    legend = axes.legend(frameon=False, title="at the end (thick: staged)", loc="center left", bbox_to_anchor=(1, 0.5))
    legend.get_title().set_fontsize("small")
    _save(figure, path)


def _perplexity_axis(axes: Axes, curves: Sequence[Curve]) -> None:
    """Show what follows the first quarter of each run: the perplexities before are ten times as high."""
    top = max(curve.ys[len(curve.ys) // 4] for curve in curves)
    bottom = min(min(curve.ys) for curve in curves)
    axes.set_yscale("log")
    axes.set_ylim(bottom * 0.97, max(top, bottom * 1.05) * 1.03)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8)))
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.yaxis.set_minor_formatter(NullFormatter())


def draw_positions(curves: Sequence[Curve], title: str, path: Path) -> None:
    """Draw the loss by position in the segment: each position faint, the mean of 1, 2, 4, 8, ... positions strong."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    strong: list[float] = []
    for curve, colour in zip(curves, ("#4d4d4d", "#e23413", "#00499a"), strict=False):
        axes.plot(curve.xs, curve.ys, linewidth=0.7, alpha=0.3, color=colour)
        middles, means = zip(*_doubling_means(curve), strict=True)
        axes.plot(middles, means, "o-", linewidth=2.2, markersize=5, color=colour, label=curve.label)
        strong += means
    axes.set_ylim(min(strong) - 0.3, max(strong) + 0.2)  # single positions may scatter beyond
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.set(xlabel="position in the segment", ylabel="loss (nats)", title=title)
    axes.legend(frameon=False)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    _save(figure, path)


def _doubling_means(curve: Curve) -> list[tuple[float, float]]:
    """Return the means over positions 1, 2, 3-4, 5-8, ..., each at its middle on the logarithmic axis."""
    found = []
    first, last = 0, 1
    while first < len(curve.ys):
        ys = curve.ys[first:last]
        found.append((math.sqrt((first + 1) * (first + len(ys))), sum(ys) / len(ys)))
        first, last = last, 2 * last
    return found


def _grid_of(presented: Presented) -> list[tuple[RunSpec, float | None, float | None]]:
    """Return what the rows train, with the paper's figure and ours; nothing if the table is not a grid of stages."""
    cells = []
    for row, (cell, *others) in zip(presented.table.rows, presented.cells, strict=True):
        spec = row.subject
        if others or not isinstance(spec, RunSpec):
            return []
        if spec.first_length:
            cells.append((spec, cell.paper, cell.here.mean if cell.here else None))
    return cells if len({spec.first_epochs for spec, *_ in cells}) > 1 else []


def _draw_grids(presented: Presented, path: Path) -> None:
    """Draw the paper's figures and ours as heat maps of the first stage's length and duration, side by side."""
    cells = _grid_of(presented)
    lengths = sorted({spec.first_length or 0 for spec, *_ in cells})
    epochs = sorted({spec.first_epochs for spec, *_ in cells})
    size = (3.2 + 1.5 * len(lengths), 1.8 + 0.55 * len(epochs))
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    paper = {(spec.first_epochs, spec.first_length): figure for spec, figure, _ in cells}
    here = {(spec.first_epochs, spec.first_length): figure for spec, _, figure in cells}
    for axes, name, figures in zip(panels, ("paper", "here"), (paper, here), strict=True):
        _draw_grid(axes, [[figures.get((epoch, length)) for length in lengths] for epoch in epochs])
        axes.set_xticks(range(len(lengths)), [str(length) for length in lengths])
        axes.set_yticks(range(len(epochs)), [str(epoch) for epoch in epochs])
        axes.set(xlabel="length of the first stage", title=name)
    panels[0].set_ylabel("epochs of the first stage")
    figure.suptitle(f"Table {presented.table.number}: {presented.table.title} ({presented.table.columns[0]})")
    _save(figure, path)


def _draw_grid(axes: Axes, figures: Sequence[Sequence[float | None]]) -> None:
    """Draw one heat map. The worst seventh of the cells shares a colour, or it would hide the differences of others."""
    values = [[math.nan if figure is None else figure for figure in row] for row in figures]
    finite = [value for row in values for value in row if math.isfinite(value)]
    low = min(finite, default=0.0)
    high = sorted(finite)[len(finite) * 6 // 7] if finite else low
    shown = [[value if math.isfinite(value) else math.nan for value in row] for row in values]
    axes.imshow(shown, cmap="viridis", vmin=low, vmax=high if high > low else low + 1, aspect="auto")
    for y, row in enumerate(values):
        for x, value in enumerate(row):
            is_dark = math.isfinite(value) and value < (low + high) / 2
            text = "-" if math.isnan(value) else _in_cell(value)
            weight = "bold" if value == low else "normal"
            axes.text(x, y, text, ha="center", va="center", color="white" if is_dark else "black", fontweight=weight)


def _in_cell(value: float) -> str:
    if math.isinf(value):
        return short(value)
    return f"{value:.2f}" if value < 100 else f"{value:.1f}"


def _draw_columns(presented: Presented, path: Path) -> None:
    """Draw the paper's figures and the measured ones on separate axes, to compare the shapes of the curves."""
    table = presented.table
    labels = [row.label for row in table.rows]
    by_column = zip(*presented.cells, strict=True)
    columns = [index for index, cells in enumerate(by_column) if any(cell.here for cell in cells)]
    figure = Figure(figsize=(max(6, 2 + 0.35 * len(labels)), 2 + 2 * max(1, len(columns))), layout="constrained")
    panels = figure.subplots(max(1, len(columns)), 1, sharex=True, squeeze=False)[:, 0]
    for axes, index in zip(panels, columns, strict=False):
        _draw_column(axes, presented, index)
        axes.set_ylabel(f"{table.columns[index]}\nhere")
    panels[-1].set_xticks(range(len(labels)), labels, rotation=60, ha="right", fontsize="small")
    figure.suptitle(f"Table {table.number}: {table.title}", fontsize="medium")
    _save(figure, path)


def _draw_column(axes: Axes, presented: Presented, index: int) -> None:
    pairs = [cells[index] for cells in presented.cells]
    line = "-" if _is_series(presented) else ""
    here = [figures.mean if figures and math.isfinite(figures.mean) else math.nan for _, figures in pairs]
    spread = [(figures.spread if figures else None) or 0.0 for _, figures in pairs]
    shown: list[Line2D | ErrorbarContainer] = [
        axes.errorbar(range(len(pairs)), here, yerr=spread, fmt=f"o{line}", capsize=3, label="here")
    ]
    axes.grid(alpha=0.3)
    paper = [math.nan if figure is None else figure for figure, _ in pairs]
    if not all(map(math.isnan, paper)):
        paper_axes = axes.twinx()
        shown += paper_axes.plot(range(len(pairs)), paper, f"s{line}", color="tab:gray", label="paper")
        paper_axes.set_ylabel("paper", color="tab:gray")
    axes.legend(handles=shown, frameon=False, fontsize="small")


def _is_series(presented: Presented) -> bool:
    """True if the rows are one model at several lengths, so that a line between them means something."""
    return len({spec.model for row in presented.table.rows if isinstance(spec := row.subject, RunSpec)}) == 1


def _save(figure: Figure, path: Path) -> None:
    with rc_context({"svg.hashsalt": "table"}):
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
