"""The implementations that the training benchmark compares compute the same."""

from __future__ import annotations

import pytest
import torch

from benchmarks.plain.model import PlainModel
from benchmarks.plain.optimizer import PlainNAG
from megatron_style.config.model import ModelConfig
from megatron_style.engine.optimizer import NAG
from megatron_style.model.shortformer import Shortformer
from megatron_style.parallel.sharding import initialise
from megatron_style.parallel.topology import Axis

VOCAB_SIZE, LENGTH = 60, 12


@pytest.mark.parametrize("cached", [True, False])
def test_the_plain_model_learns_what_ours_learns(cached: bool) -> None:
    vocabulary = {"kind": "adaptive", "cutoffs": [20, 40], "factor": 2}
    sizes = {"layers": 2, "hidden_size": 16, "heads": 2, "ffn_size": 32, "vocabulary": vocabulary}
    kind = {"positions": "infused" if cached else "added", "cache": cached}
    config = ModelConfig.parse(sizes | kind, source="model")
    ours, plain = Shortformer(config, VOCAB_SIZE), PlainModel(config, VOCAB_SIZE)
    initialise(ours, 1, Axis())
    plain.load_state_dict(ours.state_dict())
    mine = NAG(ours.parameters(), lr=0.1, momentum=0.99)
    theirs = PlainNAG(plain.parameters(), momentum=0.99, clip_norm=1e9)
    cache, caches = ours.empty_memory(3, LENGTH if cached else 0), plain.empty_caches(3)
    generator = torch.Generator().manual_seed(4)
    for _ in range(3):
        ids, targets = torch.randint(VOCAB_SIZE, (2, 3, LENGTH), generator=generator)
        nll, cache, *_ = ours(ids, targets, cache)
        loss, caches = plain(ids, targets, caches if cached else plain.empty_caches(3))
        torch.testing.assert_close(nll.mean(), loss, rtol=1e-5, atol=0)
        nll.mean().backward()
        loss.backward()
        mine.step()
        mine.zero_grad()
        theirs.step(0.1)
    for name, weight in ours.named_parameters():
        torch.testing.assert_close(weight, plain.get_parameter(name), rtol=1e-4, atol=1e-6)
