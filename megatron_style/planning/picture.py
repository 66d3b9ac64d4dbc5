"""An estimate as a picture: memory and time of each stage, and the share of communication by number of GPUs. A colour
means the same in all charts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from megatron_style.base.units import COUNT, duration
from megatron_style.planning.estimate import USABLE, RunEstimate, StageEstimate
from megatron_style.planning.hardware import GIB

# What is kept is blue, what is computed purple, what is sent red.
_COLOURS = {
    "weights": "#00499a",
    "gradients": "#5b8fd6",
    "optimizer": "#b3cdf0",
    "caches": "#0f9f6a",
    "buffers": "#9aa3ad",
    "activations": "#e2a013",
    "arithmetic": "#5b3a8c",
    "update": "#b79fd9",
    "tensor-parallel messages": "#e23413",
    "data-parallel messages": "#f5a593",
    "all messages": "#8c1d08",
}


def draw(estimate: RunEstimate, path: Path, *, name: str) -> None:
    """Write the picture in the format that the file's suffix names."""
    charts = 3 if len(estimate.scaling) > 1 else 2
    figure = Figure(figsize=(5 * charts, 6), layout="constrained")
    figure.suptitle(f"{name}: {_in_one_line(estimate)}")
    axes = figure.subplots(1, charts)
    _draw_memory(axes[0], estimate)
    _draw_time(axes[1], estimate)
    if charts == 3:
        _draw_scaling(axes[2], estimate)
    figure.savefig(path)


def _in_one_line(estimate: RunEstimate) -> str:
    """Return the model, the GPUs, and the run's time and mean speed, if the size of the corpus is known."""
    totals = estimate.totals
    what = f"{COUNT.text(estimate.parameters)} parameters on {_gpus(estimate)}"
    if totals.seconds is None or totals.tokens is None:
        return f"{what}, time unknown without the corpus"
    speed = totals.tokens / totals.seconds
    return f"{what}, {duration(totals.seconds)} at {COUNT.text(speed)} tokens/s"


def _gpus(estimate: RunEstimate) -> str:
    return f"{estimate.data * estimate.tensor} x {estimate.gpu}"


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
    highest = _stack(axes, _names(estimate), parts, "{:.1f}")
    usable = USABLE * estimate.memory / GIB
    axes.axhline(usable, color="black", linestyle="--", label=f"usable of {estimate.memory / GIB:g}")
    axes.set(title="memory of a GPU", ylabel="GiB", ylim=(0, 1.12 * max(highest, usable)))
    _legend_below(axes, columns=3)


def _draw_time(axes: Axes, estimate: RunEstimate) -> None:
    times = [stage.time for stage in estimate.stages]
    parts = {
        "arithmetic": [time.compute for time in times],
        "update": [time.update for time in times],
        "tensor-parallel messages": [time.tensor for time in times],
        "data-parallel messages": [time.exposed for time in times],
    }
    names = [
        f"{name}\n{COUNT.text(_speed(estimate, stage))} tokens/s"
        for name, stage in zip(_names(estimate), estimate.stages, strict=True)
    ]
    highest = _stack(axes, names, parts, "{:.3g}")
    axes.set(title=f"a step on {_gpus(estimate)}", ylabel="seconds", ylim=(0, 1.12 * highest))
    _legend_below(axes)


def _speed(estimate: RunEstimate, stage: StageEstimate) -> float:
    """Return the tokens per second of a stage, over all GPUs."""
    return estimate.data * stage.stage.rows * stage.stage.segment_length / stage.time.total


def _draw_scaling(axes: Axes, estimate: RunEstimate) -> None:
    counts = [str(scale.gpus) for scale in estimate.scaling]
    shares = [100 * scale.communication_share for scale in estimate.scaling]
    bars = axes.bar(counts, shares, color=_COLOURS["all messages"], label="all messages")
    axes.bar_label(
        bars, [f"{COUNT.text(scale.tokens_per_second)}\ntokens/s" for scale in estimate.scaling], fontsize="small"
    )
    axes.axhline(50, color="black", linestyle="--", label="half of the step")
    axes.set(title="share of communication, slowest stage", xlabel="GPUs", ylabel="% of a step", ylim=(0, 112))
    _legend_below(axes)


def _stack(axes: Axes, names: Sequence[str], parts: Mapping[str, Sequence[float]], total: str) -> float:
    """Draw the parts on top of each other, under their sum, and return the largest sum."""
    bottom = [0.0] * len(names)
    for label, values in parts.items():
        bars = axes.bar(names, values, bottom=bottom, label=label, color=_COLOURS[label])
        bottom = [below + value for below, value in zip(bottom, values, strict=True)]
    axes.bar_label(bars, [total.format(height) for height in bottom], padding=2)
    return max(bottom)


def _legend_below(axes: Axes, columns: int = 2) -> None:
    axes.legend(fontsize="small", ncols=columns, loc="upper center", bbox_to_anchor=(0.5, -0.2))


def _names(estimate: RunEstimate) -> list[str]:
    return [f"stage {stage.stage.index + 1}\nL={stage.stage.segment_length}" for stage in estimate.stages]
