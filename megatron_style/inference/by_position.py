"""The mean loss by position in the segment, as a table and as a picture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_style.base.files import atomic_file
from megatron_style.inference.scoring.protocol import Protocol


class Stretch(NamedTuple):
    """The mean loss over positions first..last of the segment, counted from 1."""

    first: int
    last: int
    tokens: int
    loss: float

    def __str__(self) -> str:
        return f"{self.first}-{self.last}" if self.last > self.first else f"{self.first}"


def stretches(counts: NDArray[np.int64], losses: NDArray[np.float64]) -> Iterator[Stretch]:
    """Yield stretches of positions 1, 2, 3-4, 5-8, ...: the loss falls fastest at the start."""
    first = 0
    last = 1
    while first < len(counts):
        stretch = slice(first, min(last, len(counts)))
        tokens = int(counts[stretch].sum())
        if tokens:
            loss = float(np.nansum(losses[stretch] * counts[stretch]) / tokens)
            yield Stretch(first + 1, stretch.stop, tokens, loss)
        first = last
        last *= 2


def draw_by_position(losses: NDArray[np.float64], means: Sequence[Stretch], protocol: Protocol, path: Path) -> None:
    from matplotlib.figure import Figure  # takes half a second

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(np.arange(1, len(losses) + 1), losses, linewidth=0.8, alpha=0.4, label="each position")
    axes.hlines(
        [mean.loss for mean in means],
        [mean.first - 0.5 for mean in means],
        [mean.last + 0.5 for mean in means],
        linewidth=2.5,
        label="mean of the stretch",
    )
    cache = f", cache of {protocol.cache_length}" if protocol.cache_length else ""
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.set(xlabel="position in the segment", ylabel="loss (nats)", xlim=(0.75, len(losses) * 1.1))
    axes.set_title(f"{protocol.mode}, segments of {protocol.segment_length}{cache}")
    axes.legend(frameon=False)
    axes.grid(alpha=0.3)
    with atomic_file(path) as new:
        figure.savefig(new, dpi=150, format="png")
