"""How a parameter is split over the tensor axis, as plain numbers, for code that does not import torch."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """The logical (unsharded) shape of a parameter, and the dim it is split along."""

    shape: tuple[int, ...]
    shard_dim: int | None = None  # None: replicated on every rank
    is_table: bool = False  # its rows are token vectors

    @property
    def decays(self) -> bool:
        """True for the matrices that weight decay is meant for: not for norms, biases and token vectors."""
        return len(self.shape) > 1 and not self.is_table

    def shard_shape(self, ways: int) -> tuple[int, ...]:
        """Return the shape on each of `ways` ranks; the last ranks are padded where the dim does not divide."""
        shape = list(self.shape)
        if self.shard_dim is not None:
            shape[self.shard_dim] = -(-shape[self.shard_dim] // ways)
        return tuple(shape)

    def elements(self, ways: int = 1) -> int:
        """Return the number of elements on each of `ways` ranks."""
        return math.prod(self.shard_shape(ways))
