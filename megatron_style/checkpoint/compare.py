"""Are two models the same? Tensor by tensor, and by what they say about a fixed text."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_style.checkpoint.model_folder import parameter_shapes
from megatron_style.checkpoint.source import ModelSource
from megatron_style.config.errors import UserError
from megatron_style.inference.perplexity import Mode, Protocol, score


@dataclass(frozen=True)
class Comparison:
    tensors: int
    largest_weight_difference: float
    largest_nll_difference: float  # nats, over the tokens of the fixed text

    @property
    def largest(self) -> float:
        return max(self.largest_weight_difference, self.largest_nll_difference)


def compare(first: ModelSource, second: ModelSource) -> Comparison:
    shapes, others = parameter_shapes(first.config), parameter_shapes(second.config)
    for name in sorted(shapes.keys() | others.keys()):
        if shapes.get(name) != others.get(name):
            raise UserError(
                f"{first.path} and {second.path} are of different models: {name} is {shapes.get(name)} in one and "
                f"{others.get(name)} in the other"
            )
    weights = max(float((first.weight(name).float() - second.weight(name).float()).abs().max()) for name in shapes)
    nll = np.abs(_nll(first, first) - _nll(second, first)).max()
    return Comparison(len(shapes), weights, float(nll))


def _nll(source: ModelSource, like: ModelSource) -> np.ndarray:
    """Of three segments and a bit of random tokens, the same for every model of this vocabulary."""
    config = like.config
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, 3 * config.segment_length + 1)
    mode: Mode = "cached" if config.cache_length else "nonoverlapping"
    return score(source.load(), tokens, Protocol(mode, config.segment_length, config.cache_length), eos=config.eos).nll
