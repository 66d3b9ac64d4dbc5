"""The memory of a segment: what it can attend to of the text before it. Passed in and out, never stored in a module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_style.config.model import ModelConfig


@dataclass(frozen=True)
class Memory:
    """`layers[i]` is [rows, length, hidden]: layer i's attention input (after the layer norm, before projections),
    without positions and without gradient. It holds at most the last `capacity` tokens.

    All code that keeps, saves, loads or measures a memory uses these methods, so that another kind of memory is another
    class with the same ones."""

    layers: tuple[Tensor, ...]
    capacity: int

    @classmethod
    def empty(cls, config: ModelConfig, *, rows: int, capacity: int, like: Tensor) -> Memory:
        """Return the memory of rows that have read nothing yet."""
        return cls._of_length(config, rows, 0, capacity, like)

    @classmethod
    def full(cls, config: ModelConfig, *, rows: int, capacity: int, like: Tensor) -> Memory:
        """Return a memory of zeros, of the size that rows have in the middle of a text."""
        return cls._of_length(config, rows, capacity, capacity, like)

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], capacity: int) -> Memory:
        """Return the memory that was saved as `tensors`."""
        return cls(tuple(tensors[name] for name in sorted(tensors, key=int)), capacity)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Return everything that has to be saved, by name; the first dim of each tensor is the row."""
        return {str(index): layer for index, layer in enumerate(self.layers)}

    @property
    def length(self) -> int:
        return self.layers[0].shape[1]

    @property
    def rows(self) -> int:
        return self.layers[0].shape[0]

    def advance(self, seen: Sequence[Tensor]) -> Memory:
        """Return the memory for the next segment of the same rows. Detaches, here and nowhere else."""
        pairs = zip(self.layers, seen, strict=True)
        return Memory(tuple(self._last(old, new.detach()) for old, new in pairs), self.capacity)

    def _last(self, old: Tensor, new: Tensor) -> Tensor:
        if new.shape[1] == self.capacity:
            return new
        kept_old = max(0, min(old.shape[1], self.capacity - new.shape[1]))
        kept_new = min(new.shape[1], self.capacity)
        return torch.cat([old[:, old.shape[1] - kept_old :], new[:, new.shape[1] - kept_new :]], dim=1)

    @classmethod
    def _of_length(cls, config: ModelConfig, rows: int, length: int, capacity: int, like: Tensor) -> Memory:
        return cls(tuple(like.new_zeros(rows, length, config.hidden_size) for _ in range(config.layers)), capacity)
