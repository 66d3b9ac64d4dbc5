"""The forward and backward passes of one step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from megatron_style.data.batch import read_batch
from megatron_style.data.corpus import Corpus
from megatron_style.engine.engine import LossShare, TrainingEngine
from megatron_style.model.memory import Memory
from megatron_style.parallel.randomness import Noise, derive_key, seed_sharded_dropout
from megatron_style.parallel.topology import Topology
from megatron_style.schedule.stages import StepPlan
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
    stage = plan.stage
    share = torch.zeros((), device=engine.device)
    by_source = torch.zeros(len(corpus.train), device=engine.device) if len(corpus.train) > 1 else None
    auxiliary: dict[str, torch.Tensor] = {}
    next_caches = []
    streams = [store.tokens for store in corpus.train]
    source_tokens = plan.source_tokens
    for micro in range(stage.accumulation):
        reading = plan.read(data_rank=topology.data.rank, micro=micro)
        batch = read_batch(streams, reading, eos=corpus.eos)
        inputs, targets, counted = map(torch.from_numpy, (batch.inputs, batch.targets, batch.counted))
        memory = engine.model.empty_memory(stage.micro_rows, stage.cache_length) if plan.opens_lanes else caches[micro]
        noise = Noise(derive_key(seed, "dropout", plan.step, topology.data.rank, micro))
        seed_sharded_dropout(noise, tensor_rank=topology.tensor.rank)

        output = engine.forward(inputs, targets, memory, noise)
        nll = output.nll * counted.to(engine.device, non_blocking=True)
        micro_share = nll.sum() / sum(source_tokens)
        further = {name: loss / stage.accumulation for name, loss in output.auxiliary.items()}
        total = micro_share * topology.data.size + sum(further.values())  # the engine takes the mean over the ranks
        engine.accumulate(total, is_last=micro == stage.accumulation - 1, tally=output.tally)

        share += micro_share.detach()
        if by_source is not None:
            _add_by_source(by_source, nll.detach(), reading.sources, source_tokens)
        for name, loss in further.items():
            auxiliary[name] = auxiliary.get(name, 0.0) + loss.detach()
        next_caches.append(output.memory)
    return LossShare(share, auxiliary, by_source), tuple(next_caches)


def _add_by_source(total: torch.Tensor, nll: torch.Tensor, sources: Indices, tokens: Sequence[int]) -> None:
    """Add the losses of a micro-batch to each source's share. The rows of a source are contiguous."""
    for source in np.unique(sources):
        first, last = np.searchsorted(sources, [source, source + 1])
        total[source] += nll[first:last].sum() / tokens[source]
