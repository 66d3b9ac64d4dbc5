"""The memory of a segment: what it can attend to of the text before it. Passed in and out, never stored in a module."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import NoneType
from typing import NamedTuple, Self

import torch
from torch import Tensor

from megatron_style.config.model import CompressionConfig, ModelConfig
from megatron_style.parallel.stream import Read, Stream


@dataclass(frozen=True)
class Reach:
    """How far tokens with relative positions see: a property of an evaluation, not of a model."""

    window: int | None = None  # tokens that each one sees, itself included; None: the memory and the segment up to it
    clamp: int | None = None  # longer distances count as this one


UNLIMITED = Reach()
Replaced = tuple[Tensor, Tensor]  # tokens that leave the memory, and what they are compressed to
Compress = Callable[[Tensor, Tensor], Replaced]  # of the memory and the segment after it


class Recalled(NamedTuple):
    """What the tokens of a segment attend to in a layer, besides each other."""

    cached: Read  # [rows, length, hidden], with the features of all ranks
    replaced: Replaced | None  # if the layer compresses


class Seen(NamedTuple):
    """What a layer adds to its memory after a segment: this rank's features of it."""

    tokens: Tensor  # its attention input
    compressed: Tensor | None = None  # made of the tokens that leave the memory


@dataclass(frozen=True)
class Memory:
    """`layers[i]` is [rows, length, hidden / tensor ranks]: this rank's features of layer i's attention input (what its
    projections read), without positions and without gradient. It holds at most the last `capacity` tokens.

    All code that keeps, saves, loads or measures a memory uses these methods, so that another kind of memory is another
    class with the same ones, and a row of `MEMORIES`."""

    layers: tuple[Tensor, ...]
    capacity: int
    reach: Reach = UNLIMITED

    @classmethod
    def empty(cls, config: ModelConfig, *, rows: int, capacity: int, like: Tensor, ways: int = 1) -> Self:
        """Return what each of `ways` tensor-parallel ranks keeps for rows that have read nothing yet."""
        return cls._of_length(config, rows, cls.length_after(0, config, capacity), capacity, like, ways)

    @classmethod
    def full(cls, config: ModelConfig, *, rows: int, capacity: int, like: Tensor, ways: int = 1) -> Self:
        """Return a memory of zeros, of the size that rows have in the middle of a text."""
        return cls._of_length(config, rows, cls.length_after(capacity, config, capacity), capacity, like, ways)

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], config: ModelConfig, capacity: int) -> Self:
        """Return the memory that was saved as `tensors`."""
        return cls._of(tuple(tensors[name] for name in sorted(tensors, key=int)), config, capacity)

    @classmethod
    def length_after(cls, tokens: int, config: ModelConfig, capacity: int) -> int:
        """Return the length of the memory of rows that have read `tokens` tokens."""
        del config
        return min(tokens, capacity)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Return everything that has to be saved, by name. The first dim of each tensor is the row; the last has this
        rank's features."""
        return {str(index): layer for index, layer in enumerate(self.layers)}

    @property
    def length(self) -> int:
        return self.layers[0].shape[1]

    @property
    def rows(self) -> int:
        return self.layers[0].shape[0]

    def moved(self, move: Callable[[Tensor], Tensor]) -> Self:
        """Return the same memory in another place."""
        return replace(self, layers=tuple(map(move, self.layers)))

    def recall(self, layer: int, tokens: Tensor, compress: Compress | None, stream: Stream) -> Recalled:
        """Return what a layer remembers of the text before these tokens, which are its attention input."""
        cached = stream.remember(self.layers[layer])
        return Recalled(cached, compress and compress(cached.now, tokens))

    def advance(self, seen: Sequence[Seen]) -> Self:
        """Return the memory for the next segment of the same rows. Detaches, here and nowhere else."""
        pairs = zip(self.layers, seen, strict=True)
        return replace(self, layers=tuple(self._next(old, new) for old, new in pairs))

    def _next(self, old: Tensor, new: Seen) -> Tensor:
        if new.tokens.shape[1] == self.capacity:
            return new.tokens.detach()
        return torch.cat(_last(self.capacity, old, new.tokens.detach()), dim=1)

    @classmethod
    def _of_length(cls, config: ModelConfig, rows: int, length: int, capacity: int, like: Tensor, ways: int) -> Self:
        layers = tuple(like.new_zeros(rows, length, config.hidden_size // ways) for _ in range(config.layers))
        return cls._of(layers, config, capacity)

    @classmethod
    def _of(cls, layers: tuple[Tensor, ...], config: ModelConfig, capacity: int) -> Self:
        del config
        return cls(layers, capacity)


@dataclass(frozen=True)
class CompressiveMemory(Memory):
    """Each layer begins with `slots` compressed ones, made of tokens that have left the memory; the last `capacity`
    tokens follow. Both begin as zeros, which are attended to, as in the authors' code: it is always full."""

    slots: int = 0

    @classmethod
    def length_after(cls, tokens: int, config: ModelConfig, capacity: int) -> int:
        del tokens
        assert config.memory is not None
        return config.memory.compressed + capacity

    def _next(self, old: Tensor, new: Seen) -> Tensor:
        assert new.compressed is not None, "this model does not compress"
        compressed, tokens = old.split([self.slots, self.capacity], dim=1)
        kept = _last(self.slots, compressed, new.compressed.detach())
        return torch.cat([*kept, *_last(self.capacity, tokens, new.tokens.detach())], dim=1)

    @classmethod
    def _of(cls, layers: tuple[Tensor, ...], config: ModelConfig, capacity: int) -> Self:
        assert config.memory is not None
        return cls(layers, capacity, slots=config.memory.compressed)


MEMORIES: Mapping[type, type[Memory]] = {NoneType: Memory, CompressionConfig: CompressiveMemory}


def memory_of(config: ModelConfig) -> type[Memory]:
    """Return the kind of a model's memory."""
    return MEMORIES[type(config.memory)]


def _last(count: int, old: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    """Return the parts of two stretches of text that hold their last `count` tokens."""
    kept_new = min(new.shape[1], count)
    kept_old = min(old.shape[1], count - kept_new)
    return old[:, old.shape[1] - kept_old :], new[:, new.shape[1] - kept_new :]
