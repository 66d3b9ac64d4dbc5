"""An estimate as tables of text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from megatron_style.base.units import duration, size
from megatron_style.planning.estimate import RunEstimate, StageEstimate
from megatron_style.planning.hardware import GIB


@dataclass(frozen=True)
class Table:
    header: Sequence[str]
    rows: Sequence[Sequence[object]]


def summary(estimate: RunEstimate) -> dict[str, object]:
    text = estimate.text
    totals = estimate.totals
    zero = estimate.sharding
    shares = ", ".join(f"{share:.1%}" for share in text.band_shares)
    return {
        "parameters": estimate.parameters,
        "vocabulary": f"{text.vocab_size:,} tokens, by band {shares}",
        "grid": f"{estimate.data} data x {estimate.tensor} tensor, ZeRO {zero.zero_stage}, {zero.precision}",
        "GPU": f"{estimate.gpu}, {estimate.memory / GIB:g} GiB, efficiency {estimate.efficiency:.3g}",
        "steps": totals.steps,
        "tokens": totals.tokens,
        "FLOPs": totals.flops,
        "time": duration(totals.seconds),
        "time at the last length": duration(totals.seconds_at_last_length),
        "saved by stages": "unknown" if totals.saving is None else f"{totals.saving:.1%}",
        "checkpoint": size(estimate.saving.checkpoint_bytes),
        "a crash costs": _crash(estimate.saving.lost_seconds),
    } | {f"blend of stage {stage}": shares for stage, shares in enumerate(estimate.blend, start=1)}


def tables(estimate: RunEstimate) -> Iterator[Table]:
    yield _by_stage("memory of a GPU", _MEMORY_CELLS, estimate)
    yield _by_stage("one step", _STEP_CELLS, estimate)
    yield _by_zero_stage(estimate)
    if len(estimate.scaling) > 1:
        yield _by_number_of_gpus(estimate)


def _crash(lost_seconds: float | None) -> str:
    if lost_seconds is None:
        return "all steps since the beginning of the stage (output.save_every is null)"
    return f"up to {duration(lost_seconds)} of work, half of it on average (output.save_every)"


Cell = Callable[[StageEstimate], object]
_MEMORY_CELLS: Mapping[str, Cell] = {
    "weights": lambda stage: size(stage.memory.states.weights),
    "gradients": lambda stage: size(stage.memory.states.gradients),
    "optimizer": lambda stage: size(stage.memory.states.optimizer),
    "caches": lambda stage: size(stage.memory.caches),
    "buffers": lambda stage: size(stage.memory.states.buffers),
    "activations": lambda stage: size(stage.memory.activations.peak),
    "  of the blocks": lambda stage: size(stage.memory.activations.blocks),
    "  of embedding and logits": lambda stage: size(stage.memory.activations.vocabulary),
    "  without recompute": lambda stage: size(stage.unrecomputed),
    "  with recompute": lambda stage: size(stage.recomputed),
    "total": lambda stage: size(stage.memory.total),
    "and in host memory": lambda stage: size(stage.memory.states.host + stage.memory.host_caches),
    "fits": lambda stage: stage.fits,
    "rows at once": lambda stage: f"{stage.stage.micro_rows} of {stage.stage.rows}",
    "largest micro_rows that fits": lambda stage: stage.largest_micro_rows or "none",
}
_STEP_CELLS: Mapping[str, Cell] = {
    "segment + cache": lambda stage: f"{stage.stage.segment_length} + {stage.stage.cache_length}",
    "FLOPs per token": lambda stage: f"{stage.flops_per_token:.4g}",
    "  with dense attention": lambda stage: f"{stage.dense_flops_per_token:.4g}",
    "gradients sent, MB": lambda stage: f"{stage.traffic.gradients / 1e6:,.1f}",
    "weights sent, MB": lambda stage: f"{stage.traffic.weights / 1e6:,.1f}",
    "tensor-parallel sums sent, MB": lambda stage: f"{stage.traffic.tensor / 1e6:,.1f}",
    "arithmetic": lambda stage: duration(stage.time.compute),
    "update": lambda stage: duration(stage.time.update),
    "tensor-parallel messages": lambda stage: duration(stage.time.tensor),
    "data-parallel messages": lambda stage: duration(stage.time.data),
    "step": lambda stage: duration(stage.time.total),
    "steps": lambda stage: stage.extent.steps,
    "tokens": lambda stage: stage.extent.tokens,
    "stage": lambda stage: duration(stage.seconds),
}


def _by_stage(title: str, cells: Mapping[str, Cell], estimate: RunEstimate) -> Table:
    names = [f"stage {stage.stage.index + 1}" for stage in estimate.stages]
    return Table([title, *names], [[name, *map(cell, estimate.stages)] for name, cell in cells.items()])


def _by_zero_stage(estimate: RunEstimate) -> Table:
    rows = []
    for stage, states in enumerate(estimate.zero_stages):
        held = (states.weights, states.gradients, states.optimizer)
        rows.append([f"ZeRO {stage}", *map(size, held), size(sum(held))])
    return Table(["states of a GPU", "weights", "gradients", "optimizer", "sum"], rows)


def _by_number_of_gpus(estimate: RunEstimate) -> Table:
    rows = [
        [
            f"{scale.gpus:,}",
            f"{scale.step_seconds:.3g}",
            f"{scale.communication_seconds:.3g}",
            f"{scale.communication_share:.0%}",
            f"{scale.tokens_per_second:,.0f}",
            "communication dominates" if scale.dominates else "",
        ]
        for scale in estimate.scaling
    ]
    return Table(["GPUs", "step, s", "communication, s", "share", "tokens/s", ""], rows)
