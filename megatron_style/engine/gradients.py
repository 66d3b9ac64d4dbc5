"""The forward and backward passes of one step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import reduce
from itertools import pairwise

import numpy as np
import torch

from megatron_style.data.batch import ages_in_lanes, read_batch
from megatron_style.data.corpus import Corpus
from megatron_style.engine.engine import LossShare, TrainingEngine
from megatron_style.model.memory import Memory
from megatron_style.parallel.randomness import Noise, derive_key, seed_sharded_dropout
from megatron_style.parallel.topology import Topology
from megatron_style.schedule.stages import Stage, StepPlan
from megatron_style.schedule.unread import Indices


def accumulate_gradients(
    engine: TrainingEngine,
    corpus: Corpus,
    plan: StepPlan,
    caches: tuple[Memory, ...],
    topology: Topology,
    seed: int,
) -> tuple[LossShare, tuple[Memory, ...]]:
    """Do the forward and backward passes of one step's micro-batches, each with its own lanes and memory."""
    shares = []
    next_caches = []
    memories = _opened(engine, plan.stage) if plan.opens_lanes else engine.caches.fetched(caches)
    for micro, memory in enumerate(memories):
        share, following = _accumulate_micro_batch(engine, corpus, plan, micro, memory, topology, seed)
        shares.append(share)
        next_caches.append(following)
    engine.caches.settle()
    return _total(shares), tuple(next_caches)


def _total(shares: Sequence[LossShare]) -> LossShare:
    nll = reduce(torch.add, [share.nll for share in shares])
    names = shares[0].auxiliary
    auxiliary = {name: reduce(torch.add, [share.auxiliary[name] for share in shares]) for name in names}
    of_sources = [share.by_source for share in shares if share.by_source is not None]
    return LossShare(nll, auxiliary, reduce(torch.add, of_sources) if of_sources else None)


def _opened(engine: TrainingEngine, stage: Stage) -> Iterator[Memory]:
    """Yield the memories of lanes of which nothing has been read."""
    for _ in range(stage.accumulation):
        yield engine.model.empty_memory(stage.micro_rows, stage.cache_length)


def _accumulate_micro_batch(
    engine: TrainingEngine, corpus: Corpus, plan: StepPlan, micro: int, memory: Memory, topology: Topology, seed: int
) -> tuple[LossShare, Memory]:
    """Return a micro-batch's share of the losses, and the memory of its rows for the next step."""
    accumulation = plan.stage.accumulation
    with engine.times.measure("data"):
        reading = plan.read(data_rank=topology.data.rank, micro=micro)
        streams = [store.tokens for store in corpus.train]
        batch = read_batch(streams, reading, eos=corpus.eos)
        ages = None
        if (document_end := engine.model.config.document_end) is not None:
            ages = torch.from_numpy(ages_in_lanes(streams, reading, document_end, plan.stage.cache_length))
    inputs, targets, counted = map(torch.from_numpy, (batch.inputs, batch.targets, batch.counted))
    noise = Noise(derive_key(seed, "dropout", plan.step, topology.data.rank, micro))
    seed_sharded_dropout(noise, tensor_rank=topology.tensor.rank)

    with engine.times.measure("forward"):
        output = engine.forward(inputs, targets, memory, noise, ages)
    nll_BT = output.nll * counted.to(engine.device, non_blocking=True)
    tokens = plan.source_tokens
    nll = nll_BT.sum() / sum(tokens)
    further = {name: loss / accumulation for name, loss in output.auxiliary.items()}
    loss = nll * topology.data.size + sum(further.values())  # the engine takes the mean over the ranks
    with engine.times.measure("backward"):
        engine.accumulate(loss, is_last=micro == accumulation - 1, tally=output.tally)
    by_source = _by_source(nll_BT.detach(), reading.sources, tokens) if len(tokens) > 1 else None
    share = LossShare(nll.detach(), {name: loss.detach() for name, loss in further.items()}, by_source)
    return share, engine.caches.keep(output.memory)


def _by_source(nll_BT: torch.Tensor, sources: Indices, tokens: Sequence[int]) -> torch.Tensor:
    """Return each source's loss, over its tokens of the step. The rows of a source are contiguous."""
    bounds = np.searchsorted(sources, np.arange(len(tokens) + 1)).tolist()
    sums = [nll_BT[first:last].sum() / count for (first, last), count in zip(pairwise(bounds), tokens, strict=True)]
    return torch.stack(sums)
