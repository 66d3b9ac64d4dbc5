"""Before the first step: does every stage fit? One forward and backward at the shape of each, on the real grid."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from megatron_style.config.errors import UserError
from megatron_style.model.cache import SegmentCache
from megatron_style.parallel.randomness import Noise, derive_key
from megatron_style.runtime.engine import TrainingEngine
from megatron_style.runtime.memory import is_out_of_memory, peak_memory
from megatron_style.schedule.stages import Stage


def preflight(engine: TrainingEngine, stages: Sequence[Stage]) -> Iterator[tuple[Stage, int]]:
    """Each stage with its peak of memory in bytes, the largest first. Leaves the training state as it was."""
    for stage in sorted(stages, key=_attention_cost, reverse=True):
        with peak_memory(engine.device) as peak:
            try:
                rehearse(engine, stage)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                raise UserError(_advice(stage, error)) from None
            yield stage, peak()


def rehearse(engine: TrainingEngine, stage: Stage) -> None:
    """A second micro-batch, where there is one, meets the gradients of the first in memory."""
    ids = torch.zeros(stage.micro_rows, stage.segment_length, dtype=torch.long)
    empty = engine.model.empty_cache(stage.micro_rows, stage.cache_length)
    full = tuple(layer.new_zeros(stage.micro_rows, stage.cache_length, layer.shape[-1]) for layer in empty.layers)
    noise = Noise(derive_key("preflight"))
    with engine.discarded_update():
        for is_last in (False, True) if stage.accumulation > 1 else (True,):
            nll, _ = engine.forward(ids, ids, SegmentCache(full, stage.cache_length), noise)
            engine.accumulate(nll.sum() * float("inf"), is_last=is_last)


def _attention_cost(stage: Stage) -> int:
    return stage.micro_rows * stage.segment_length * (stage.segment_length + stage.cache_length)


def _advice(stage: Stage, error: RuntimeError) -> str:
    smaller = [n for n in range(1, stage.micro_rows) if stage.rows % n == 0]
    remedy = f"set stages.{stage.index}.micro_rows to {smaller[-1]} or less" if smaller else "use more tensor ranks"
    reason = str(error).split("\n")[0][:200]
    return f"{stage}: does not fit into memory; {remedy}, or parallel.recompute=true ({reason})"
