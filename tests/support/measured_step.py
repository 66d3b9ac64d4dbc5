"""Measure the memory of a real step, rank by rank, by counting storages."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from unittest.mock import patch

import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401  what every engine imports, once before ranks are forked
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron_style.config.run import RunConfig
from megatron_style.data.batch import read_batch
from megatron_style.data.corpus import Corpus, open_corpus
from megatron_style.engine.build import build_engine
from megatron_style.engine.engine import TrainingEngine
from megatron_style.engine.gradients import accumulate_gradients
from megatron_style.engine.session import distributed_session
from megatron_style.model.kernels.parts import Parts
from megatron_style.model.memory import Memory
from megatron_style.parallel.device import products
from megatron_style.parallel.local_ranks import run_ranks
from megatron_style.parallel.randomness import Noise
from megatron_style.parallel.topology import Topology
from megatron_style.rehearsal.live_bytes import LiveBytes, bytes_of
from megatron_style.schedule.stages import StageSchedule, StepPlan


@dataclass(frozen=True)
class Measured:
    """The bytes on one rank."""

    states: int  # weights, gradients and optimizer, between two micro-batches
    activations: int  # the peak of a micro-batch above the bytes before it, without the cache it returns
    total: int  # the peak of a complete step


def measure_step(world: int, run: RunConfig, *, rank: int = 0) -> Measured:
    """Measure the step of a model without dropout, with attention and products that need no scratch memory in any
    precision, as on a GPU."""
    with products_as_on_a_gpu(), patch("megatron_style.model.attention.attend", _attend):
        measured: Measured = run_ranks(world, _measure, run, rank)[rank]
    return measured


@contextmanager
def products_as_on_a_gpu() -> Iterator[None]:
    """Leave all products to torch, without the rows that fill a block for oneDNN."""
    with patch.multiple(products, LEAST=2**62, _BLOCK=1):
        yield


def _attend(q: Tensor, cached: tuple[Tensor, Tensor], inside: tuple[Tensor, Tensor], *, dropout: float) -> Tensor:
    assert not dropout
    if cached[0].shape[2] == 0:
        return F.scaled_dot_product_attention(q, *inside, is_causal=True)
    attended: Tensor = Parts.apply(q, *cached, *inside)  # type: ignore[no-untyped-call]
    return attended


def _measure(run: RunConfig, rank: int) -> Measured:
    live = LiveBytes()
    meter = live if dist.get_rank() == rank else nullcontext()  # it doubles the time of a step
    with meter, distributed_session(tensor=run.parallel.tensor) as topology:
        corpus = open_corpus(run.data)
        schedule = StageSchedule(run, corpus_tokens=corpus.train_tokens, data_parallel=topology.data.size)
        engine = build_engine(run, schedule, corpus.vocab_size, topology)
        caches: tuple[Memory, ...] = ()
        for step in range(3):  # the first ones fill the caches and create the optimizer states
            live.mark()
            _, caches = accumulate_gradients(engine, corpus, schedule.plan(step), caches, topology, run.seed)
            engine.update(0.1)
        total = live.peak
        kept = bytes_of(layer for cache in caches for layer in cache.layers)
        states, activations = _micro_batches(live, engine, corpus, schedule.plan(3), caches[0], topology)
        return Measured(states - kept, activations, total)


def _micro_batches(
    live: LiveBytes, engine: TrainingEngine, corpus: Corpus, plan: StepPlan, cache: Memory, topology: Topology
) -> tuple[int, int]:
    """Return the bytes alive before a micro-batch that adds to existing gradients, and its peak above them."""
    batch = read_batch([corpus.train[0].tokens], plan.read(data_rank=topology.data.rank, micro=0), eos=corpus.eos)
    inputs = torch.from_numpy(batch.inputs)
    targets = torch.from_numpy(batch.targets)
    base = made = 0
    for is_last in (False, True):
        gc.collect()  # garbage in reference cycles is not part of the state
        base = live.mark()
        output = engine.forward(inputs, targets, cache, Noise(1))
        made = bytes_of(output.memory.layers)
        engine.accumulate(output.nll.mean() + sum(output.auxiliary.values()), is_last=is_last)
        del output
    return base, live.peak - base - made
