"""The shapes of a model's parameters by name, without torch.

A kind of attention or of vocabulary is a row in a table here. Names and order are those of
`Shortformer.named_parameters()`: a module's own parameters come before those of the modules in it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from megatron_style.config.model import ModelConfig
from megatron_style.parallel.split import Shape

Shapes = dict[str, Shape]


@dataclass(frozen=True)
class BandShape:
    """The token ids first..last of a vocabulary band, and the width of their vectors."""

    first: int
    last: int
    width: int

    @property
    def tokens(self) -> int:
        return self.last - self.first


class Unit(NamedTuple):
    """The sublayers between two points at which activations can be dropped and recomputed."""

    attention: int | None  # the block whose attention sublayer comes first, if any
    feed_forward: int | None  # the block whose feed-forward sublayer comes then, if any


def units(config: ModelConfig) -> tuple[Unit, ...]:
    """Return the order of the sublayers: s^k (sf)^(n-k) f^k for a sandwich of k. Without one, a unit is a block."""
    n = config.layers
    k = config.sandwich
    return tuple(Unit(i if i < n else None, i - k if i >= k else None) for i in range(n + k))


def bands(config: ModelConfig, vocab_size: int) -> tuple[BandShape, ...]:
    """Return the bands of the vocabulary, the head first. One that is not adaptive has a single band of full width."""
    factor = config.vocabulary.factor
    edges = pairwise((0, *config.vocabulary.cutoffs, vocab_size))
    return tuple(BandShape(first, last, config.hidden_size // factor**i) for i, (first, last) in enumerate(edges))


def parameters(config: ModelConfig, vocab_size: int) -> Shapes:
    shapes = _inside("vocabulary", _VOCABULARIES[config.vocabulary.kind](config, vocab_size))
    for layer in range(config.layers):
        shapes |= _inside(f"blocks.{layer}", _block(config, layer))
    return shapes


def buffers(config: ModelConfig) -> Shapes:
    """Return the buffers that learn outside the optimizer: the centroids of routing layers."""
    if config.routing is None:
        return {}
    clusters = (config.routing.heads, config.routing.clusters)
    each = {"means": Shape((*clusters, config.hidden_size // config.heads), 0), "counts": Shape(clusters, 0)}
    shapes: Shapes = {}
    for layer in range(config.routing.first_layer, config.layers):
        shapes |= _inside(f"blocks.{layer}.attention.routed", each)
    return shapes


def count_parameters(config: ModelConfig, vocab_size: int, *, ways: int = 1) -> int:
    """Return the number of parameters on each of `ways` tensor-parallel ranks."""
    return sum(shape.elements(ways) for shape in parameters(config, vocab_size).values())


def _block(config: ModelConfig, layer: int) -> Shapes:
    D = config.hidden_size
    ffn = config.ffn_size
    is_routed = config.routing is not None and layer >= config.routing.first_layer
    attention = _routed_attention if is_routed else _attention_of
    return {
        **_inside("attention_norm", _norm(D)),
        **_inside("attention", attention(config)),
        **_inside("compression", _compression(config)),
        **_inside("ffn_norm", _norm(D)),
        **_inside("up", _column_parallel(D, ffn)),
        **_inside("down", _row_parallel(ffn, D)),
    }


def _attention(config: ModelConfig, heads: int | None = None) -> Shapes:
    D = config.hidden_size
    width = D // config.heads * (heads or config.heads)
    return {
        **_inside("query", _column_parallel(D, width)),
        **_inside("key", _column_parallel(D, width)),
        **_inside("value", _column_parallel(D, width)),
        **_inside("out", _row_parallel(width, D)),
    }


def _routed_attention(config: ModelConfig) -> Shapes:
    """Return the shapes of local heads, and of routing heads, which have no keys of their own."""
    assert config.routing is not None
    D = config.hidden_size
    width = D // config.heads * config.routing.heads
    return {
        **_attention(config, config.heads - config.routing.heads),
        **_inside("routed.query", _column_parallel(D, width)),
        **_inside("routed.value", _column_parallel(D, width)),
        "routed.out.weight": Shape((D, width), 1),
    }


def _relative_attention(config: ModelConfig) -> Shapes:
    D = config.hidden_size
    projections = {name: shape for name, shape in _attention(config).items() if name.endswith(".weight")}
    distance = Shape((D, D), 0)
    return {**_biases(config, "content_bias", "distance_bias"), **projections, "distance.weight": distance}


def _compressive_relative_attention(config: ModelConfig) -> Shapes:
    D = config.hidden_size
    inward = ("query.weight", "key.weight", "value.weight")
    return {
        **_biases(config, "content_bias", "distance_bias", "slot_bias"),
        **{name: Shape((D, D), 0) for name in inward},
        **_inside("out", _row_parallel(D, D)),
        "distance.weight": Shape((D, D), 0),
        "slot_distance.weight": Shape((D, D), 0),
    }


def _biases(config: ModelConfig, *names: str) -> Shapes:
    return {name: Shape((config.heads, config.hidden_size // config.heads), 0) for name in names}


_ATTENTIONS: Mapping[str, Callable[[ModelConfig], Shapes]] = {
    "added": _attention,
    "infused": _attention,
    "relative": _relative_attention,
}
_COMPRESSIVE_ATTENTIONS: Mapping[str, Callable[[ModelConfig], Shapes]] = {
    "infused": _attention,
    "relative": _compressive_relative_attention,
}


def _attention_of(config: ModelConfig) -> Shapes:
    kinds = _ATTENTIONS if config.memory is None else _COMPRESSIVE_ATTENTIONS
    return kinds[config.positions](config)


def _no_parameters(config: ModelConfig, rate: int) -> Shapes:
    del config, rate
    return {}


def _convolution(config: ModelConfig, rate: int) -> Shapes:
    D = config.hidden_size
    return {"kernel.weight": Shape((D, rate * D), 1)}


_COMPRESSIONS: Mapping[str, Callable[[ModelConfig, int], Shapes]] = {
    "convolution": _convolution,
    "mean": _no_parameters,
    "max": _no_parameters,
}


def _compression(config: ModelConfig) -> Shapes:
    if config.memory is None:
        return {}
    return _COMPRESSIONS[config.memory.function](config, config.memory.rate)


def _adaptive(config: ModelConfig, vocab_size: int) -> Shapes:
    D = config.hidden_size
    biases = config.vocabulary.biases
    projections = config.vocabulary.projections
    found = bands(config, vocab_size)
    shapes = {"clusters": Shape((len(found) - 1, D))}
    if biases:
        shapes["cluster_biases"] = Shape((len(found) - 1,))
    for i, band in enumerate(found):
        if projections != "none":
            shapes[f"bands.{i}.projection"] = Shape((D, band.width))
        if projections == "both" and i == 0:
            shapes[f"bands.{i}.output_projection"] = Shape((D, band.width))
        shapes |= _inside(f"bands.{i}.table", _table(band.tokens, band.width, biases=biases))
    return shapes


def _tied(config: ModelConfig, vocab_size: int) -> Shapes:
    return _inside("table", _table(vocab_size, config.hidden_size, biases=config.vocabulary.biases))


def _untied(config: ModelConfig, vocab_size: int) -> Shapes:
    return {
        **_inside("table", _table(vocab_size, config.hidden_size)),
        **_inside("output_table", _table(vocab_size, config.hidden_size, biases=config.vocabulary.biases)),
    }


_VOCABULARIES: Mapping[str, Callable[[ModelConfig, int], Shapes]] = {
    "adaptive": _adaptive,
    "tied": _tied,
    "untied": _untied,
}


def _column_parallel(in_features: int, out_features: int) -> Shapes:
    return {"weight": Shape((out_features, in_features), 0), "bias": Shape((out_features,), 0)}


def _row_parallel(in_features: int, out_features: int) -> Shapes:
    return {"weight": Shape((out_features, in_features), 1), "bias": Shape((out_features,))}


def _norm(size: int) -> Shapes:
    return {"weight": Shape((size,)), "bias": Shape((size,))}


def _table(tokens: int, width: int, *, biases: bool = False) -> Shapes:
    shapes = {"weight": Shape((tokens, width), 0, is_table=True)}
    return shapes | ({"bias": Shape((tokens,), 0)} if biases else {})


def _inside(name: str, shapes: Mapping[str, Shape]) -> Shapes:
    return {f"{name}.{inner}": shape for inner, shape in shapes.items()}
