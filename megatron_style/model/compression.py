"""The compression of tokens that leave the memory (Compressive Transformer), in the kinds that `memory.function` names.

Shape letters: B rows, T segment tokens, C remembered slots and tokens, N groups of R tokens, D hidden, H local heads,
E head size.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_style.config.model import ModelConfig
from megatron_style.model.memory import Replaced
from megatron_style.parallel.collectives import reduce_from_shards
from megatron_style.parallel.layers import RowParallelLinear
from megatron_style.parallel.sharding import normal
from megatron_style.parallel.topology import Axis

KeysValues = tuple[Tensor, Tensor]


class Compression(nn.Module):
    """Compresses the tokens that leave the memory after a segment: the oldest of both, as many as the segment has."""

    def __init__(self, config: ModelConfig, axis: Axis) -> None:
        super().__init__()
        assert config.memory is not None
        del axis
        self.slots = config.memory.compressed
        self.rate = config.memory.rate

    def forward(self, cached_BCD: Tensor, segment_BTD: Tensor) -> Replaced:
        """Return the tokens, without gradient, and their slots. Tokens that fill no group of `rate` are left out; only
        the last segment of a text has any, and nothing reads the memory after it."""
        count = segment_BTD.shape[1] // self.rate * self.rate
        left_BND = leaving(cached_BCD, segment_BTD, self.slots, count)
        return left_BND, self.compress(left_BND.unflatten(1, (-1, self.rate)))

    @abstractmethod
    def compress(self, groups_BNRD: Tensor) -> Tensor:
        """Return one slot for each group."""


class Convolution(Compression):
    """A convolution whose kernel and stride are the rate. Its inputs are split over the tensor axis."""

    def __init__(self, config: ModelConfig, axis: Axis) -> None:
        super().__init__(config, axis)
        self.axis = axis
        D = config.hidden_size
        fan_in = self.rate * D
        self.kernel = RowParallelLinear(fan_in, D, axis=axis, weight=normal(fan_in**-0.5), bias=None)

    def compress(self, groups_BNRD: Tensor) -> Tensor:
        share = groups_BNRD.flatten(2).chunk(self.axis.size, dim=-1)[self.axis.rank]
        slots: Tensor = self.kernel(share)
        return slots


class Mean(Compression):
    def compress(self, groups_BNRD: Tensor) -> Tensor:
        return groups_BNRD.mean(2)


class Max(Compression):
    def compress(self, groups_BNRD: Tensor) -> Tensor:
        return groups_BNRD.amax(2)


COMPRESSIONS: Mapping[str, type[Compression]] = {"convolution": Convolution, "mean": Mean, "max": Max}


def compression_of(config: ModelConfig, axis: Axis) -> Compression | None:
    return None if config.memory is None else COMPRESSIONS[config.memory.function](config, axis)


def leaving(cached: Tensor, segment: Tensor, slots: int, count: int) -> Tensor:
    """Return the oldest `count` tokens after the slots, of memory and segment, without gradient. The dim of tokens is
    the last but one."""
    oldest = cached[..., slots : slots + count, :]
    if (missing := count - oldest.shape[-2]) > 0:
        oldest = torch.cat([oldest, segment[..., :missing, :]], dim=-2)
    return oldest.detach()


def reconstruction_loss(queries_BHTE: Tensor, left: KeysValues, slots: KeysValues, axis: Axis) -> Tensor:
    """Return the mean squared difference of attention to the tokens that leave and attention to their slots, over all
    heads. Nothing is masked, and nothing has a position."""
    if left[0].shape[2] == 0:  # a segment shorter than the rate
        return slots[0].sum() + slots[1].sum()
    wanted = F.scaled_dot_product_attention(queries_BHTE, *left)
    found = F.scaled_dot_product_attention(queries_BHTE, *slots)
    difference = found - wanted
    if difference.dtype.itemsize < 4:
        difference = difference.float()
    return reduce_from_shards(difference.square().mean() / axis.size, axis)
