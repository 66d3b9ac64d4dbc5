"""A pass: how the unread text is distributed over the rows of the batch, one segment per row and step.

In text order each row reads a *lane*, a contiguous stretch, so that the cache of a row is always the text just before
it. Shuffled, a row may get any segment. Either way each unread token is read once, and only the last step of a pass is
short.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron_style.schedule.random_order import RandomOrder
from megatron_style.schedule.unread import Indices, Unread


@dataclass(frozen=True)
class Reading:
    """The tokens of some rows in one step: row i reads places[i, :lengths[i]] of the stream of its source."""

    places: Indices  # [rows, width]; beyond a row's length they repeat a valid place
    lengths: Indices  # [rows]
    sources: Indices  # [rows]; numbers in the order of data.train
    stretches: Indices  # [rows]: the token at which the contiguous unread text begins in which the segment begins


@dataclass(frozen=True)
class Pass(ABC):
    """A pass over one source."""

    unread: Unread
    rows: int  # of this source, over all data-parallel ranks
    segment_length: int

    @property
    @abstractmethod
    def steps(self) -> int: ...

    @abstractmethod
    def extent(self, turn: int, rows: Indices) -> tuple[Indices, Indices]:
        """Return the first place and the length of each row's segment; the length of a row that is through is zero."""

    @abstractmethod
    def after(self, turns: int) -> Unread:
        """Return the text that remains after the first `turns` steps."""

    @abstractmethod
    def tokens_before(self, turn: int) -> int:
        """Return the tokens of all rows in the turns before this one, without a look at every segment."""

    def place(self, turn: int) -> str:
        """Return a digest of what has been read before a turn: of the text unread at first, and of how it is read."""
        settings = (type(self).__name__, self.unread.digest, self.rows, self.segment_length, self.order_key, turn)
        return hashlib.sha256(repr(settings).encode()).hexdigest()[:16]

    @property
    def order_key(self) -> tuple[int, ...]:
        """Return what decides the order, apart from the text."""
        return ()

    def tokens_at(self, turn: int) -> int:
        """Return the tokens of all rows in this turn."""
        return int(self._lengths(turn).sum())

    def width(self, turn: int) -> int:
        """Return the length of the longest segment of all rows."""
        return int(self._lengths(turn).max())

    def read(self, turn: int, rows: Indices, width: int) -> tuple[Indices, Indices, Indices]:
        """Return the places, lengths and stretches of the rows' segments; see `Reading`."""
        firsts, lengths = self.extent(turn, rows)
        offsets = np.minimum(np.arange(width), np.maximum(lengths - 1, 0)[:, None])
        places = np.minimum(firsts[:, None] + offsets, self.unread.tokens - 1)
        return self.unread.in_stream(places), lengths, self.unread.stretches_of(places[:, 0])

    def _lengths(self, turn: int) -> Indices:
        return self.extent(turn, np.arange(self.rows))[1]


@dataclass(frozen=True)
class TextLanes(Pass):
    @property
    def steps(self) -> int:
        longest_lane = _ceil_div(self.unread.tokens, self.rows)
        return _ceil_div(longest_lane, self.segment_length)

    def extent(self, turn: int, rows: Indices) -> tuple[Indices, Indices]:
        firsts = self._bounds[rows] + turn * self.segment_length
        return firsts, np.clip(self._bounds[rows + 1] - firsts, 0, self.segment_length)

    def tokens_before(self, turn: int) -> int:
        lanes = np.diff(self._bounds)
        return int(np.minimum(lanes, turn * self.segment_length).sum())

    def after(self, turns: int) -> Unread:
        ends = self._bounds[1:]
        return self.unread.keep(np.minimum(self._bounds[:-1] + turns * self.segment_length, ends), ends)

    @cached_property
    def _bounds(self) -> Indices:
        """Return the bounds of the lanes: lane i is the places bounds[i]..bounds[i + 1]. Their lengths differ by at
        most one token."""
        lanes = np.arange(self.rows + 1)
        length, longer = divmod(self.unread.tokens, self.rows)
        return lanes * length + lanes * longer // self.rows  # lanes * tokens would overflow 64 bits


@dataclass(frozen=True)
class ShuffledSegments(Pass):
    key: tuple[int, ...]

    @property
    def steps(self) -> int:
        return _ceil_div(self._segments, self.rows)

    def extent(self, turn: int, rows: Indices) -> tuple[Indices, Indices]:
        tokens = self.unread.tokens
        index = turn * self.rows + rows
        is_there = index < self._segments
        firsts = np.full(len(rows), tokens)
        firsts[is_there] = self._order.at(index[is_there]) * self.segment_length
        return firsts, np.clip(tokens - firsts, 0, self.segment_length)

    @property
    def order_key(self) -> tuple[int, ...]:
        return (*self.key, *self._order.settings)

    def tokens_before(self, turn: int) -> int:
        """Return the tokens of the turns before this one. All segments are full but the text's last, which may be read
        at any turn."""
        if turn == 0 or turn >= self.steps:  # no order is needed, which takes long to make
            return self.unread.tokens if turn else 0
        read = turn * self.rows
        missing = self._segments * self.segment_length - self.unread.tokens
        return read * self.segment_length - (missing if self._order.place_of_last < read else 0)

    def after(self, turns: int) -> Unread:
        if turns >= self.steps:
            return Unread.entire(0)
        firsts, lasts = self._order.rest(turns * self.rows)
        return self.unread.keep(
            firsts * self.segment_length, np.minimum(lasts * self.segment_length, self.unread.tokens)
        )

    @property
    def _segments(self) -> int:
        return _ceil_div(self.unread.tokens, self.segment_length)

    @cached_property
    def _order(self) -> RandomOrder:
        return RandomOrder(self.key, self._segments)


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)
