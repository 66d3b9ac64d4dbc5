"""The parameters of a model as sizes, without building it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_style.config.model import ModelConfig
from megatron_style.planning.vocabulary import bands_of


@dataclass(frozen=True)
class ParameterSize:
    """A parameter of `rows` x `columns`, of which there are `copies`. Its rows or columns may be split over ranks."""

    rows: int
    columns: int = 1
    split: bool = False
    copies: int = 1

    def on_rank(self, tensor: int) -> int:
        """Elements of one copy on each of the tensor-parallel ranks; the last ranks are padded."""
        return (-(-self.rows // tensor) if self.split else self.rows) * self.columns


def parameters_of(model: ModelConfig, vocab_size: int) -> tuple[ParameterSize, ...]:
    return (*_of_vocabulary(model, vocab_size), *_of_blocks(model))


def count_parameters(model: ModelConfig, vocab_size: int, *, tensor: int = 1) -> int:
    """On each tensor-parallel rank; with one rank, of the whole model."""
    return sum(size.copies * size.on_rank(tensor) for size in parameters_of(model, vocab_size))


def _of_vocabulary(model: ModelConfig, vocab_size: int) -> Iterator[ParameterSize]:
    D, bands = model.hidden_size, bands_of(model, vocab_size)
    if model.vocabulary.kind != "adaptive":
        yield ParameterSize(vocab_size, D, split=True, copies=1 if model.vocabulary.kind == "tied" else 2)
        return
    for band in bands:
        yield ParameterSize(band.tokens, band.width, split=True)
        yield ParameterSize(D, band.width)  # its projection
    yield ParameterSize(len(bands) - 1, D)  # the clusters


def _of_blocks(model: ModelConfig) -> Iterator[ParameterSize]:
    D, ffn, layers = model.hidden_size, model.ffn_size, model.layers
    yield ParameterSize(D, D, split=True, copies=4 * layers)  # query, key, value, out
    yield ParameterSize(D, split=True, copies=3 * layers)  # their biases, but for out's
    yield ParameterSize(ffn, D, split=True, copies=2 * layers)  # up and down
    yield ParameterSize(ffn, split=True, copies=layers)  # up's bias
    yield ParameterSize(D, copies=6 * layers)  # two norms, and the biases of out and down
