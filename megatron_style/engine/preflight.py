"""Check before the first step that every stage fits: a forward and backward pass of each shape, on the real grid."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import NoReturn

import torch

from megatron_style.base.command import log
from megatron_style.base.errors import OnlyChecked, UserError
from megatron_style.engine.engine import TrainingEngine
from megatron_style.model.caches import OnDevice
from megatron_style.parallel.device.peak_memory import is_out_of_memory, peak_memory
from megatron_style.parallel.randomness import Noise, derive_key
from megatron_style.schedule.stages import Stage


def preflight(engine: TrainingEngine, stages: Sequence[Stage]) -> Iterator[tuple[Stage, int]]:
    """Yield each stage with its peak memory in bytes, the largest first. The training state stays the same."""
    if engine.zero_stage == 3 and stages:
        # The first pass of ZeRO 3, which records the order of the weights, gathers more of them than any later one.
        rehearse(engine, replace(stages[0], segment_length=1, cache_length=0, rows=1, micro_rows=1))
    for stage in sorted(stages, key=_attention_cost, reverse=True):
        with peak_memory(engine.device) as peak:
            try:
                rehearse(engine, stage)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                raise UserError(_advice(engine, stage, error)) from None
            yield stage, peak()


def check_only(engine: TrainingEngine, stages: Sequence[Stage], *, is_first: bool) -> NoReturn:
    """Do what comes before the first step, and leave."""
    for stage, peak in preflight(engine, stages):
        if is_first:
            log(preflight_line(stage, peak))
    raise OnlyChecked("dry run: all stages fit, and nothing was written; leave out --dry-run to train")


def preflight_line(stage: Stage, peak: int) -> str:
    return f"preflight: {stage}: peak memory {peak / 2**30:.2f} GiB on the first rank"


def rehearse(engine: TrainingEngine, stage: Stage) -> None:
    """Allocate what a step allocates: the caches of all micro-batches, old and new, gradients, and what the update
    needs. Two micro-batches are computed, so that the second adds to the gradients of the first; the rest are caches
    only."""
    ids = torch.zeros(stage.micro_rows, stage.segment_length, dtype=torch.long)
    noise = Noise(derive_key("preflight"))
    full = partial(engine.full_memory, stage.micro_rows, stage.cache_length)
    caches = [engine.caches.keep(full()) for _ in range(stage.accumulation)]
    following = [engine.caches.keep(full()) for _ in range(stage.accumulation - 2)]
    with engine.rehearsed_update():
        for micro, memory in zip(range(min(2, stage.accumulation)), engine.caches.fetched(caches), strict=False):
            ages = None if engine.model.config.document_end is None else ids
            output = engine.forward(ids, ids, memory, noise, ages)
            loss = output.nll.sum() + sum(output.auxiliary.values())
            engine.accumulate(loss * 0.0, is_last=micro == 1 or stage.accumulation == 1)
            following.append(engine.caches.keep(output.memory))
        del memory, output
        caches.clear()  # as in a step, they are freed before the update


def _attention_cost(stage: Stage) -> int:
    return stage.micro_rows * stage.segment_length * (stage.segment_length + stage.cache_length)


def _advice(engine: TrainingEngine, stage: Stage, error: RuntimeError) -> str:
    smaller = [n for n in range(1, stage.micro_rows) if stage.rows % n == 0]
    remedy = f"set stages.{stage.index}.micro_rows to {smaller[-1]} or less" if smaller else "use more tensor ranks"
    remedies = ", or ".join([remedy, *_unused(engine, stage)])
    reason = str(error).split("\n")[0][:200]
    return f"{stage}: does not fit into memory; {remedies} ({reason})"


def _unused(engine: TrainingEngine, stage: Stage) -> Iterator[str]:
    """Yield the settings that would save memory."""
    model = engine.model
    if not model.sequence and model.axis.size > 1 and stage.segment_length % model.axis.size == 0:
        yield "parallel.sequence=true"
    if not model.recompute:
        yield "parallel.recompute=true"
    if stage.cache_length and isinstance(engine.caches, OnDevice):
        yield "parallel.cache=host"
