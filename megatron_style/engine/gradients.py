"""The forward and backward passes of one step."""

from __future__ import annotations

import torch

from megatron_style.data.batch import read_batch
from megatron_style.data.corpus import Corpus
from megatron_style.engine.engine import LossShare, TrainingEngine
from megatron_style.model.memory import Memory
from megatron_style.parallel.randomness import Noise, derive_key, seed_sharded_dropout
from megatron_style.parallel.topology import Topology
from megatron_style.schedule.stages import StepPlan


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
    auxiliary: dict[str, torch.Tensor] = {}
    next_caches = []
    for micro in range(stage.accumulation):
        batch = read_batch(corpus.train.tokens, plan.read(data_rank=topology.data.rank, micro=micro), eos=corpus.eos)
        inputs, targets, counted = map(torch.from_numpy, (batch.inputs, batch.targets, batch.counted))
        memory = engine.model.empty_memory(stage.micro_rows, stage.cache_length) if plan.opens_lanes else caches[micro]
        noise = Noise(derive_key(seed, "dropout", plan.step, topology.data.rank, micro))
        seed_sharded_dropout(noise, tensor_rank=topology.tensor.rank)

        output = engine.forward(inputs, targets, memory, noise)
        micro_share = (output.nll * counted.to(engine.device, non_blocking=True)).sum() / plan.tokens
        further = {name: loss / stage.accumulation for name, loss in output.auxiliary.items()}
        total = micro_share * topology.data.size + sum(further.values())  # the engine takes the mean over the ranks
        engine.accumulate(total, is_last=micro == stage.accumulation - 1, tally=output.tally)

        share += micro_share.detach()
        for name, loss in further.items():
            auxiliary[name] = auxiliary.get(name, 0.0) + loss.detach()
        next_caches.append(output.memory)
    return LossShare(share, auxiliary), tuple(next_caches)
