"""A table as a picture: a panel for each column, what was measured here beside the paper's."""

from __future__ import annotations

import math
from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from megatron_style.paper.presentation import Presented


def draw(presented: Presented, path: Path) -> None:
    """The two have axes of their own: it is their shapes that are compared."""
    table, labels = presented.table, [row.label for row in presented.table.rows]
    columns = [index for index in range(len(table.columns)) if any(cells[index][1] for cells in presented.cells)]
    figure = Figure(figsize=(max(6, 2 + 0.35 * len(labels)), 2 + 2 * len(columns)), layout="constrained")
    panels = figure.subplots(len(columns), 1, sharex=True, squeeze=False)[:, 0]
    for axes, index in zip(panels, columns, strict=True):
        _draw_column(axes, presented, index)
        axes.set_ylabel(f"{table.columns[index]}\nhere")
    panels[-1].set_xticks(range(len(labels)), labels, rotation=60, ha="right", fontsize="small")
    figure.suptitle(f"Table {table.number}: {table.title}", fontsize="medium")
    with rc_context({"svg.hashsalt": "table"}):  # the same figures give the same file
        figure.savefig(path, metadata={"Date": None})


def _draw_column(axes: Axes, presented: Presented, index: int) -> None:
    pairs = [cells[index] for cells in presented.cells]
    here = [figures.mean if figures and math.isfinite(figures.mean) else math.nan for _, figures in pairs]
    spread = [(figures.spread if figures else None) or 0.0 for _, figures in pairs]
    measured = axes.errorbar(range(len(pairs)), here, yerr=spread, fmt="o-", capsize=3, label="here")
    theirs = axes.twinx()
    paper = [math.nan if figure is None else figure for figure, _ in pairs]
    (told,) = theirs.plot(range(len(pairs)), paper, "s--", color="tab:gray", label="paper")
    theirs.set_ylabel("paper", color="tab:gray")
    axes.legend(handles=[measured, told], frameon=False, fontsize="small")
    axes.grid(alpha=0.3)
