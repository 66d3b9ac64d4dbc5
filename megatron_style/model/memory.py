"""The memory of a segment: what it can attend to of the text before it. Passed in and out, never stored in a module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_style.config.model import ModelConfig


@dataclass(frozen=True)
class Reach:
    """How far tokens with relative positions see: a property of an evaluation, not of a model."""

    window: int | None = None  # tokens that each one sees, itself included; None: the memory and the segment up to it
    clamp: int | None = None  # longer distances count as this one


UNLIMITED = Reach()


@dataclass(frozen=True)
class Memory:
    """`layers[i]` is [rows, length, hidden]: layer i's attention input (what its projections read), without positions
    and without gradient. It holds at most the last `capacity` tokens.

    All code that keeps, saves, loads or measures a memory uses these methods, so that another kind of memory is another
    class with the same ones."""

    layers: tuple[Tensor, ...]
    capacity: int
    reach: Reach = UNLIMITED

    @classmethod
    def empty(cls, config: ModelConfig, *, rows: int, capacity: int, like: Tensor, reach: Reach = UNLIMITED) -> Memory:
        """Return the memory of rows that have read nothing yet."""
        return replace(cls._of_length(config, rows, 0, capacity, like), reach=reach)

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
        return replace(self, layers=tuple(self._last(old, new.detach()) for old, new in pairs))

    def _last(self, old: Tensor, new: Tensor) -> Tensor:
        if new.shape[1] == self.capacity:
            return new
        kept_old = max(0, min(old.shape[1], self.capacity - new.shape[1]))
        kept_new = min(new.shape[1], self.capacity)
        return torch.cat([old[:, old.shape[1] - kept_old :], new[:, new.shape[1] - kept_new :]], dim=1)

    @classmethod
    def _of_length(cls, config: ModelConfig, rows: int, length: int, capacity: int, like: Tensor) -> Memory:
        return cls(tuple(like.new_zeros(rows, length, config.hidden_size) for _ in range(config.layers)), capacity)
