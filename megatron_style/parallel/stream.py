"""The vectors between layers: replicated on all tensor-parallel ranks, or split among them by position.

Megatron's sequence parallelism. Forward, and backward in brackets:

method   replicated                split by position                used
enter    identity [all-reduce]     all-gather [reduce-scatter]      before column-parallel layers
leave    all-reduce [identity]     reduce-scatter [all-gather]      after row-parallel layers
use      identity                  identity [all-reduce]            for parameters that each rank applies to its share
join     identity                  all-gather [own share]           before the loss, which all ranks compute alike
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from megatron_style.parallel.collectives import (
    copy_to_shards,
    gather_features,
    gather_positions,
    join_positions,
    reduce_from_shards,
    scatter_positions,
    sum_gradients,
)
from megatron_style.parallel.dropout import add_with_dropout, replicated_dropout
from megatron_style.parallel.randomness import Noise
from megatron_style.parallel.topology import Axis


class Again:
    """Gathers a tensor again in the backward pass: once for all layers that have read it, and none of them keeps it.
    After that the rank's own share is free, too, even if the graph lives on."""

    def __init__(self, gather: Callable[[], Tensor]) -> None:
        self._gather: Callable[[], Tensor] | None = gather
        self._gathered: Tensor | None = None
        self._readers = 0

    def will_read(self) -> None:
        self._readers += 1

    def read(self) -> Tensor:
        assert self._gather is not None, "the backward pass runs once"
        if self._gathered is None:
            self._gathered = self._gather()
        found = self._gathered
        self._readers -= 1
        if self._readers == 0:
            self._gathered = None
            self._gather = None
        return found


class Read(NamedTuple):
    """The input of column-parallel layers."""

    now: Tensor
    again: Again | None = None  # None: it is kept for the backward pass
    added: Tensor | None = None  # what has been added to the gathered tensor

    def plus(self, added: Tensor) -> Read:
        return Read(self.now + added, self.again, added)


@dataclass(frozen=True)
class Stream:
    """How the vectors between layers are spread over the tensor axis in one forward pass."""

    axis: Axis
    is_split: bool = False  # by position
    recalls: bool = False  # what is gathered is gathered again in the backward pass; else it is kept

    def enter(self, x: Tensor) -> Read:
        if not self.is_split:
            return Read(copy_to_shards(x, self.axis))
        share = x.detach()
        return self._read(gather_positions(x, self.axis), lambda: gather_positions(share, self.axis))

    def remember(self, share: Tensor) -> Read:
        """Return all features of a memory, of which each rank keeps its share. It has no gradient."""
        if self.axis.size == 1:
            return Read(share)
        return self._read(gather_features(share, self.axis), lambda: gather_features(share, self.axis))

    def leave(self, partial: Tensor) -> Tensor:
        reduce = scatter_positions if self.is_split else reduce_from_shards
        return reduce(partial, self.axis)

    def use(self, *params: Tensor) -> tuple[Tensor, ...]:
        return sum_gradients(params, self.axis) if self.is_split else params

    def join(self, x: Tensor) -> Tensor:
        return join_positions(x, self.axis) if self.is_split else x

    def own(self, table: Tensor) -> Tensor:
        """Return the rows of a table of positions that belong to this rank's share."""
        return table.chunk(self.axis.size)[self.axis.rank] if self.is_split else table

    def length(self, x: Tensor) -> int:
        """Return the number of positions of which `x` has all or a share."""
        return x.shape[1] * (self.axis.size if self.is_split else 1)

    def dropout(self, x: Tensor, rate: float, noise: Noise | None) -> Tensor:
        """Drop the same elements on all ranks or, of a share, each rank its own."""
        return replicated_dropout(x, rate, self._noise(noise))

    def add(self, x: Tensor, update: Tensor, rate: float, noise: Noise | None) -> Tensor:
        """Add the output of a sublayer to its input, after the same dropout."""
        return add_with_dropout(x, update, rate, self._noise(noise))

    def _noise(self, noise: Noise | None) -> Noise | None:
        if self.is_split and noise is not None:
            return noise.at(f"tensor rank {self.axis.rank}")
        return noise

    def _read(self, gathered: Tensor, gather: Callable[[], Tensor]) -> Read:
        return Read(gathered, Again(gather) if self.recalls else None)
