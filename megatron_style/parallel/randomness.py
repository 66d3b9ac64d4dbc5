"""Keyed randomness: a key is derived from what a random number is for, and no generator state is kept.

Recomputing a block therefore gives the same numbers again, a resumed run needs no generator state, and every grid
starts from the same weights.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch


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


def drawn_key() -> int:
    """Return a key from torch's default generator, which `seed_sharded_dropout` seeds and torch restores when a block
    is recomputed."""
    return int(torch.randint(2**63 - 1, ()))


def seed_sharded_dropout(noise: Noise, *, tensor_rank: int) -> None:
    key = noise.at(f"tensor rank {tensor_rank}").key
    if torch.accelerator.is_available():
        torch.manual_seed(key)
    else:  # torch.manual_seed would also keep this stack as text, for a GPU to come
        torch.default_generator.manual_seed(key)
