"""Continuations by small models, and models whose continuations are worth comparing."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, islice

import torch

from megatron_style.config.model import ModelFolderConfig
from megatron_style.inference.beams import Hypothesis, beam_search
from megatron_style.inference.sampling import Sampler, generate
from megatron_style.model.shortformer import Shortformer
from megatron_style.parallel.sharding import initialise
from megatron_style.parallel.topology import Axis
from tests.support.tiny import tiny_model

EOS = 2
GREEDY = Sampler(temperature=0)
KINDS = ["adaptive", "tied", "untied"]
PROMPTS = [[], [7], [5, 9, 30], [5, 9, 30, 11], [5, 9, 30, 11, 4, 36, 20, 19, 8, 3]]


def continuations(
    model: Shortformer,
    prompts: Sequence[Sequence[int]],
    sampler: Sampler = GREEDY,
    tokens: int = 30,
    *,
    L: int = 4,
    C: int = 4,
    seed: int = 1,
    first: int = 0,
) -> list[list[int]]:
    stream = generate(model, prompts, sampler, segment_length=L, cache_length=C, eos=EOS, seed=seed, first=first)
    return [list(row) for row in zip(*islice(stream, tokens), strict=True)]


def continuation(
    model: Shortformer,
    prompt: Sequence[int],
    sampler: Sampler = GREEDY,
    tokens: int = 30,
    *,
    L: int = 4,
    C: int = 4,
    seed: int = 1,
) -> list[int]:
    return continuations(model, [prompt], sampler, tokens, L=L, C=C, seed=seed)[0]


def searched(
    model: Shortformer,
    prompt: Sequence[int],
    beams: int,
    tokens: int,
    ends: Sequence[int] = (),
    *,
    L: int = 4,
    C: int = 4,
) -> Hypothesis:
    progress = beam_search(
        model,
        prompt,
        beams=beams,
        tokens=tokens,
        segment_length=L,
        cache_length=C,
        eos=EOS,
        ended=lambda text: text[-1] in ends,
    )
    return list(progress)[-1]


def model_of_seed(config: ModelFolderConfig, seed: int, scale: float = 2.0) -> Shortformer:
    """Return a model with larger weights than initial ones, with which it would repeat the last token for ever."""
    model = tiny_model(config)
    initialise(model, seed, Axis())
    with torch.no_grad():
        for param in chain.from_iterable(block.parameters() for block in model.blocks):
            param.mul_(scale)
    return model
