"""Rehearse a step of every stage as one rank of a grid of any size, on fake tensors: without GPUs and other ranks.

The engine, the model and the shapes are real, so settings that conflict or do not fit into memory are found before a
cluster is booked. What is not real is listed in `stand_ins.py`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import numpy as np
import torch

from megatron_style.base.command import log
from megatron_style.base.errors import UserError
from megatron_style.config.ds_file import read_ds_file
from megatron_style.config.run import RunConfig
from megatron_style.data.store import open_store
from megatron_style.engine.build import build_engine
from megatron_style.engine.engine import TrainingEngine
from megatron_style.engine.session import distributed_session
from megatron_style.parallel.randomness import Noise, derive_key
from megatron_style.parallel.topology import check_world
from megatron_style.planning.memory import estimate_memory, largest_micro_rows
from megatron_style.planning.setup import Setup, setup_of, sharding_of
from megatron_style.planning.text import TextFacts, text_facts, zipf_ids
from megatron_style.rehearsal.live_bytes import LiveBytes
from megatron_style.rehearsal.stand_ins import HostTensor, fake_rank
from megatron_style.schedule.blend import sources_of
from megatron_style.schedule.stages import Stage, StageSchedule, stages_of

_SECONDS_BETWEEN_LINES = 10.0
_SAVINGS: Mapping[str, Any] = {"sequence": True, "recompute": True, "cache": "host"}  # the cheapest first


@dataclass(frozen=True)
class StageRehearsal:
    """The memory of one stage on the rehearsed rank, in bytes."""

    stage: Stage
    passes: int  # the peak of all forward and backward passes of a step
    update: int  # the peak of the optimizer's update
    peak: int  # the larger of the two
    planned: float  # the planner's peak of a step
    remedy: str | None  # None: it fits


@dataclass(frozen=True)
class Rehearsal:
    rank: int
    ranks: int
    usable: float  # bytes of a GPU's memory that are available to a run
    stages: tuple[StageRehearsal, ...]  # those that ran
    failure: str | None  # why the next one failed; those after it were not tried


@dataclass(frozen=True)
class _Stages:
    """The part of a schedule that `build_engine` reads; the rest would need a corpus."""

    stages: tuple[Stage, ...]


def rehearse(run: RunConfig, *, ranks: int, rank: int, usable: float) -> Rehearsal:
    """Run a step of each stage on one rank."""
    _check_grid(run, ranks, rank)
    text = text_facts(run)
    run = run.on_ranks(ranks // run.parallel.tensor).with_vocabulary(text.vocab_size)
    setup = _planned_setup(run, text, ranks)
    stages = stages_of(run)
    ids = torch.from_numpy(_typical_ids(run, text)).as_subclass(HostTensor)
    done: list[StageRehearsal] = []
    doing = "engine"
    failure = None
    log(f"rehearsing rank {rank} of {ranks}: building its engine")
    with fake_rank(rank, of=ranks) as live, distributed_session(tensor=run.parallel.tensor) as topology:
        try:
            engine = build_engine(run, cast("StageSchedule", _Stages(stages)), text.vocab_size, topology)
            doing = str(stages[0])
            _settle(engine, live, stages[0], ids)
            for stage in stages:
                doing = str(stage)
                log(f"rehearsing {doing}")
                passes, update = _step(engine, live, stage, ids)
                peak = max(passes, update)
                planned = estimate_memory(setup, stage).total
                remedy = _remedy(setup, stage, usable * planned / peak) if peak > usable else None
                done.append(StageRehearsal(stage, passes, update, peak, planned, remedy))
        except (RuntimeError, AssertionError, IndexError) as error:
            failure = f"{doing}: {_first_line(error)}"
    return Rehearsal(rank, ranks, usable, tuple(done), failure)


def _check_grid(run: RunConfig, ranks: int, rank: int) -> None:
    check_world(ranks, run.parallel.tensor)
    if not 0 <= rank < ranks:
        raise UserError(f"--rank {rank}: not in a grid of {ranks} processes; it must be 0 to {ranks - 1}")


def _planned_setup(run: RunConfig, text: TextFacts, ranks: int) -> Setup:
    sharding = sharding_of(run, read_ds_file(run.deepspeed))
    if sharding.offloads_optimizer or sharding.offloads_weights:
        raise UserError(
            f"{run.deepspeed}: offloads to host memory, which fake tensors cannot tell from a GPU's; rehearse with a "
            f"ds_config that does not (--set deepspeed=...), or use `plan` without --rehearse"
        )
    return setup_of(run, text, sharding, gpus=ranks)


def _typical_ids(run: RunConfig, text: TextFacts) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return a batch of ids with the frequencies of the text or, without it, of Zipf's law. They decide how many
    vectors a tensor-parallel rank looks up, and how many tokens each band scores."""
    count = run.data.tokens_per_batch
    if text.tokens is not None:
        return _ids_of_text(run, text, count)
    return zipf_ids(text.vocab_size, count)


def _ids_of_text(run: RunConfig, text: TextFacts, count: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return ids from all over the text, as many of each source of a blend as its share, in random order."""
    counts = sources_of(run.data, text.source_tokens).allot(count, 1, "data.tokens_per_batch")
    parts = []
    for source, own_count in zip(run.data.sources, counts, strict=True):
        tokens = open_store(source.path).tokens
        parts.append(tokens[np.linspace(0, len(tokens) - 1, own_count).astype(np.int64)].astype(np.int64))
    return parts[0] if len(parts) == 1 else np.random.default_rng(run.seed).permutation(np.concatenate(parts))


def _settle(engine: TrainingEngine, live: LiveBytes, stage: Stage, ids: torch.Tensor) -> None:
    """Do a step with one row, which brings the engine into the state of a running one: the optimizer has its state, and
    ZeRO 3 knows the order in which it gathers weights."""
    _step(engine, live, Stage(stage.index, stage.segment_length, stage.cache_length, rows=1, micro_rows=1), ids)


def _step(engine: TrainingEngine, live: LiveBytes, stage: Stage, ids: torch.Tensor) -> tuple[int, int]:
    """Return the peak of all forward and backward passes, and that of the update. As in `train`, the caches of the last
    step are held until the update, and those for the next one to the end."""
    shape = (stage.micro_rows, stage.segment_length)
    batch = ids[: stage.micro_rows * stage.segment_length].view(shape)
    full = partial(engine.full_memory, stage.micro_rows, stage.cache_length)
    caches = [engine.caches.keep(full()) for _ in range(stage.accumulation)]
    next_caches = []
    live.mark()
    last_line = time.monotonic()
    for micro, memory in enumerate(engine.caches.fetched(caches)):
        if time.monotonic() - last_line > _SECONDS_BETWEEN_LINES:
            log(f"rehearsing stage {stage.index + 1}: micro-batch {micro + 1} of {stage.accumulation}")
            last_line = time.monotonic()
        ages = None if engine.model.config.document_end is None else torch.zeros_like(batch)
        output = engine.forward(batch, batch, memory, Noise(derive_key("rehearsal", micro)), ages)
        assert output.nll.shape == shape, f"{tuple(output.nll.shape)} losses for {shape} targets"
        loss = output.nll.mean() + sum(output.auxiliary.values())
        engine.accumulate(loss, is_last=micro == stage.accumulation - 1)
        next_caches.append(engine.caches.keep(output.memory))
        del output
    passes = live.peak
    del memory
    caches.clear()
    live.mark()
    engine.update(None)
    return passes, live.peak


def _remedy(setup: Setup, stage: Stage, plannable: float) -> str:
    """Return what would fit by the plan, which is assumed to be wrong by the same factor for other shapes."""
    fitting = largest_micro_rows(setup, stage, plannable)
    if fitting is not None:
        return f"set stages.{stage.index}.micro_rows to {fitting}"
    unused = [(key, value) for key, value in _SAVINGS.items() if getattr(setup, key) != value]
    if setup.tensor == 1:
        unused.remove(("sequence", True))
    if not stage.cache_length:
        unused.remove(("cache", "host"))
    enough = [
        (key, value) for key, value in unused if largest_micro_rows(replace(setup, **{key: value}), stage, plannable)
    ]
    if settings := enough[:1] or unused:
        return "set " + " and ".join(f"parallel.{key} to {str(value).lower()}" for key, value in settings)
    return "use more tensor-parallel ranks, a higher ZeRO stage or a smaller data.tokens_per_batch"


def _first_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0].strip()[:200] if lines else 'no message'}"
