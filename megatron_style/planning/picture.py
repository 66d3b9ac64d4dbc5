"""An estimate as a picture: memory and time of each stage, and the share of communication by number of GPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from megatron_style.planning.estimate import USABLE, RunEstimate
from megatron_style.planning.hardware import GIB


def draw(estimate: RunEstimate, path: Path) -> None:
    """Write the picture in the format that the file's suffix names."""
    charts = 3 if len(estimate.scaling) > 1 else 2
    figure = Figure(figsize=(5 * charts, 5), layout="constrained")
    axes = figure.subplots(1, charts)
    _draw_memory(axes[0], estimate)
    _draw_time(axes[1], estimate)
    if charts == 3:
        _draw_scaling(axes[2], estimate)
    figure.savefig(path)


def _draw_memory(axes: Axes, estimate: RunEstimate) -> None:
    parts: dict[str, list[float]] = {}
    for stage in estimate.stages:
        states = stage.memory.states
        for name, value in {
            "weights": states.weights,
            "gradients": states.gradients,
            "optimizer": states.optimizer,
            "caches": stage.memory.caches,
            "buffers": states.buffers,
            "activations": stage.memory.activations.peak,
        }.items():
            parts.setdefault(name, []).append(value / GIB)
    _stack(axes, _names(estimate), parts)
    axes.axhline(
        USABLE * estimate.memory / GIB, color="black", linestyle="--", label=f"usable of {estimate.memory / GIB:g}"
    )
    axes.set(title="memory of a GPU", ylabel="GiB")
    _legend_below(axes)


def _draw_time(axes: Axes, estimate: RunEstimate) -> None:
    times = [stage.time for stage in estimate.stages]
    parts = {
        "arithmetic": [time.compute for time in times],
        "update": [time.update for time in times],
        "tensor-parallel messages": [time.tensor for time in times],
        "data-parallel messages": [time.exposed for time in times],
    }
    _stack(axes, _names(estimate), parts)
    axes.set(title=f"a step on {estimate.data * estimate.tensor} x {estimate.gpu}", ylabel="seconds")
    _legend_below(axes)


def _draw_scaling(axes: Axes, estimate: RunEstimate) -> None:
    counts = [str(scale.gpus) for scale in estimate.scaling]
    colours = ["tab:red" if scale.dominates else "tab:blue" for scale in estimate.scaling]
    axes.bar(counts, [100 * scale.communication_share for scale in estimate.scaling], color=colours)
    axes.axhline(50, color="black", linestyle="--")
    axes.set(title="share of communication", xlabel="GPUs", ylabel="% of a step", ylim=(0, 100))


def _stack(axes: Axes, names: Sequence[str], parts: Mapping[str, Sequence[float]]) -> None:
    bottom = [0.0] * len(names)
    for label, values in parts.items():
        axes.bar(names, values, bottom=bottom, label=label)
        bottom = [below + value for below, value in zip(bottom, values, strict=True)]


def _legend_below(axes: Axes) -> None:
    axes.legend(fontsize="small", ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.14))


def _names(estimate: RunEstimate) -> list[str]:
    return [f"stage {stage.stage.index + 1}\nL={stage.stage.segment_length}" for stage in estimate.stages]
