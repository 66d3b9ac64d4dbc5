"""A memory for rows that are consecutive segments of one text, so that one pass reads many segments of it.

A segment attends in each layer to what the segments before it fed to that same layer. All rows are in the same layer at
the same time, so each finds its memory in the rows before it. The result is that of a walk segment by segment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch import Tensor

from megatron_style.model.memory import Compress, Memory, Recalled, Seen
from megatron_style.parallel.collectives import own_features
from megatron_style.parallel.stream import Read, Stream
from megatron_style.parallel.topology import Axis


@dataclass(frozen=True)
class ChainedMemory(Memory):
    """`layers[i]` is [1, length, hidden / tensor ranks], the memory before the first row of the first rank of `axis`;
    other ranks do not read it. The rows of each rank follow those of the rank before, and hold at least as many tokens
    as a memory is made of."""

    slots: int = 0  # compressed ones, with which a compressive memory begins
    axis: Axis = field(default_factory=Axis)

    @classmethod
    def after(cls, memory: Memory, axis: Axis) -> Self:
        """Return the chain of the rows that follow the only row of a full memory."""
        assert memory.rows == 1
        return cls(memory.layers, memory.capacity, memory.reach, memory.length - memory.capacity, axis)

    def recall(self, layer: int, tokens: Tensor, compress: Compress | None, stream: Stream) -> Recalled:
        slots, cached = self.layers[layer].split([self.slots, self.capacity], dim=1)
        before = stream.remember(self._before_each(own_features(tokens, stream.axis), cached))
        if compress is None:
            return Recalled(before, None)
        # What leaves the memory does not depend on its slots.
        blank = before.now.new_zeros(len(tokens), self.slots, tokens.shape[2])
        replaced = compress(torch.cat([blank, before.now], dim=1), tokens)
        compressed = stream.remember(self._before_each(own_features(replaced[1], stream.axis), slots))
        return Recalled(Read(torch.cat([compressed.now, before.now], dim=1)), replaced)

    def advance(self, seen: Sequence[Seen]) -> Self:
        return replace(self, layers=tuple(map(self._after_all, seen)))

    def _before_each(self, rows_BTD: Tensor, first_1CD: Tensor) -> Tensor:
        """Return the last C vectors before each row [B, C, D]; `first` are those before the first row of all."""
        C = first_1CD.shape[1]
        last_1CD = self._last_of_rank_before(rows_BTD, C)
        before_1CD = first_1CD if self.axis.rank == 0 else last_1CD
        stream_SD = torch.cat([before_1CD[0], rows_BTD.flatten(0, 1)])
        return stream_SD.unfold(0, C, rows_BTD.shape[1])[:-1].transpose(1, 2).contiguous()

    def _after_all(self, seen: Seen) -> Tensor:
        tokens = self._last_of_rank_before(seen.tokens, self.capacity)
        if seen.compressed is None:
            return tokens
        return torch.cat([self._last_of_rank_before(seen.compressed, self.slots), tokens], dim=1)

    def _last_of_rank_before(self, rows_BTD: Tensor, count: int) -> Tensor:
        """Return the last vectors of the rank before; those of the last rank are for the next rows of the first."""
        stream_SD = rows_BTD.detach().flatten(0, 1)
        assert len(stream_SD) >= count, "the rows of a rank hold less than a memory"
        return self.axis.shift(stream_SD[len(stream_SD) - count :])[None]
