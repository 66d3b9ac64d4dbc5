"""Keyed randomness: a key is derived from what a random number is for, and no generator state is kept.

Recomputing a block therefore gives the same numbers again, a resumed run needs no generator state, and every grid
starts from the same weights.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor


def derive_key(*address: int | str) -> int:
    """Return a 63-bit key for an address such as (seed, step, micro, layer)."""
    digest = hashlib.blake2b(repr(address).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@dataclass(frozen=True)
class Noise:
    """The source of the dropout masks of one forward pass. Equal on all tensor-parallel ranks."""

    key: int

    def at(self, place: int | str) -> Noise:
        return Noise(derive_key(self.key, place))


def replicated_dropout(x: Tensor, rate: float, noise: Noise | None) -> Tensor:
    """Apply dropout to a tensor that is replicated over the tensor axis: all ranks drop the same elements."""
    if noise is None or rate == 0:
        return x
    return _dropped(x, rate, MaskSource(rate, noise.key, x.device))


def sharded_dropout(x: Tensor, rate: float, noise: Noise | None) -> Tensor:
    """Apply dropout to a tensor that is split over the tensor axis: each rank drops its own elements. They come from
    torch's default generator, which `seed_sharded_dropout` seeds and torch restores when a block is recomputed."""
    if noise is None or rate == 0:
        return x
    return _dropped(x, rate, MaskSource(rate, drawn_key(), x.device))


def drawn_key() -> int:
    """Return a key from torch's default generator."""
    return int(torch.randint(2**63 - 1, ()))


def seed_sharded_dropout(noise: Noise, *, tensor_rank: int) -> None:
    torch.manual_seed(noise.at(f"tensor rank {tensor_rank}").key)


class MaskSource:
    """Draws masks one after the other; the same key gives the same ones.

    An element is kept if its random byte reaches a threshold of rate x 256, which each mask rounds up or down at random
    so that the probability is exact. Eight elements take one random word, a fraction of the time of a float each."""

    def __init__(self, rate: float, key: int, device: torch.device) -> None:
        self._rate = rate
        self._key = key
        self._drawn = 0
        self._generator = Generator(device).manual_seed(key)

    def draw(self, shape: torch.Size) -> Tensor:
        """Return a mask of bytes: 1 for an element that is kept, 0 for one that is dropped."""
        coin = derive_key(self._key, self._drawn) / 2**63
        self._drawn += 1
        words = torch.empty(-(-shape.numel() // 8), dtype=torch.int64, device=self._generator.device)
        words.random_(-(2**63), None, generator=self._generator)
        kept = words.view(torch.uint8)[: shape.numel()] >= math.floor(self._rate * 256 + coin)
        return kept.view(torch.int8).view(shape)


class _Dropped(torch.autograd.Function):
    """Keeps one byte per element for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(mask)
        ctx.scale = scale
        return (x * scale).mul_(mask)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (mask,) = ctx.saved_tensors
        return (grad * ctx.scale).mul_(mask), None, None


def _dropped(x: Tensor, rate: float, source: MaskSource) -> Tensor:
    return _Dropped.apply(x, source.draw(x.shape), 1 / (1 - rate))  # type: ignore[no-untyped-call, no-any-return]
