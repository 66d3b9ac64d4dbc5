"""Keyed randomness: a key is derived from what a random number is for, and no generator state is kept.

Recomputing a block therefore gives the same numbers again, a resumed run needs no generator state, and every grid
starts from the same weights.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


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
    generator = torch.Generator(x.device).manual_seed(noise.key)
    keep = torch.empty_like(x).bernoulli_(1 - rate, generator=generator)
    return x * keep.div_(1 - rate)


def sharded_dropout(x: Tensor, rate: float, noise: Noise | None) -> Tensor:
    """Apply dropout to a tensor that is split over the tensor axis: each rank drops its own elements. They come from
    torch's default generator, which `seed_sharded_dropout` seeds and torch restores when a block is recomputed."""
    return F.dropout(x, rate, training=noise is not None)


def seed_sharded_dropout(noise: Noise, *, tensor_rank: int) -> None:
    torch.manual_seed(noise.at(f"tensor rank {tensor_rank}").key)
