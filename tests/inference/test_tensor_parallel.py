"""Tensor-parallel ranks write what one process writes, token by token, and all of them write the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_style.config.model import ModelFolderConfig
from megatron_style.inference.sampling import Sampler
from megatron_style.model.shortformer import Shortformer
from megatron_style.parallel.local_ranks import run_ranks
from megatron_style.parallel.sharding import layout_of, shard_of
from megatron_style.parallel.topology import Topology
from tests.support.continuing import GREEDY, KINDS, PROMPTS, continuations, model_of_seed, searched
from tests.support.tiny import tiny_config

pytestmark = pytest.mark.slow

SAMPLERS = [GREEDY, Sampler(), Sampler(1.5), Sampler(0.7, top_k=9, top_p=0.8), Sampler(top_p=0.9)]
MODELS: list[dict[str, Any]] = [
    {},
    {"positions": "added"},
    {"positions": "relative"},
    {"positions": "relative", "memory": {"compressed": 4, "rate": 2}},
    {"positions": "infused", "memory": {"compressed": 4, "rate": 2}},
]
Texts = tuple[list[list[list[int]]], list[int]]  # of each sampler and prompt, and of a beam search


def texts_of(model: Shortformer) -> Texts:
    sampled = [continuations(model, PROMPTS, sampler, tokens=10) for sampler in SAMPLERS]
    return sampled, list(searched(model, PROMPTS[2], 3, 10).tokens)


@torch.no_grad()
def texts_of_rank(config: ModelFolderConfig, world: int) -> Texts:
    axis = Topology.of_world(tensor=world).tensor
    full = model_of_seed(config, 1)
    model = Shortformer(config.model, config.vocab_size, axis).double()
    for (_, param), whole in zip(model.named_parameters(), full.parameters(), strict=True):
        param.copy_(shard_of(whole, layout_of(param), axis))
    return texts_of(model)


CASES = [(kind, settings, 2) for kind in KINDS for settings in MODELS] + [(kind, {}, 4) for kind in KINDS]
IN_THE_SUITE = [(kind, {}, 2) for kind in KINDS] + [("adaptive", settings, 2) for settings in MODELS]


@pytest.mark.parametrize(
    ("kind", "settings", "world"),
    [pytest.param(*case, marks=() if case in IN_THE_SUITE else pytest.mark.sweep) for case in CASES],
    ids=str,
)
def test_ranks_write_the_texts_of_one_process(kind: str, settings: dict[str, Any], world: int) -> None:
    """Weights are split, so sums are rounded in another order: in float64 too little to change a choice."""
    config = tiny_config(kind, **settings)
    expected = texts_of(model_of_seed(config, 1))
    assert run_ranks(world, texts_of_rank, config, world) == [expected] * world
    assert len({token for texts in expected[0] for text in texts for token in text}) > 10
