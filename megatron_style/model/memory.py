"""The previous segment, as every attention layer saw it. Passed in, passed out, never stored in a module."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Memory:
    """`layers[i]` is [rows, length, hidden]: layer i's attention input (after the layer norm, before projections),
    without positions and without gradient. It holds the last `capacity` tokens at most."""

    layers: tuple[Tensor, ...]
    capacity: int

    @classmethod
    def empty(cls, *, layers: int, rows: int, hidden_size: int, capacity: int, like: Tensor) -> Memory:
        return cls(tuple(like.new_zeros(rows, 0, hidden_size) for _ in range(layers)), capacity)

    @property
    def length(self) -> int:
        return self.layers[0].shape[1]

    @property
    def rows(self) -> int:
        return self.layers[0].shape[0]

    def advance(self, seen: Sequence[Tensor]) -> Memory:
        """The cache that the next segment of the same rows needs. Detaches, here and nowhere else."""
        return Memory(
            tuple(self._last(old, new.detach()) for old, new in zip(self.layers, seen, strict=True)), self.capacity
        )

    def _last(self, old: Tensor, new: Tensor) -> Tensor:
        if new.shape[1] == self.capacity:
            return new
        kept_old = max(0, min(old.shape[1], self.capacity - new.shape[1]))
        kept_new = min(new.shape[1], self.capacity)
        return torch.cat([old[:, old.shape[1] - kept_old :], new[:, new.shape[1] - kept_new :]], dim=1)
