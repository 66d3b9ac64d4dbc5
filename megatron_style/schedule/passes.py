"""A pass: how the unread text is distributed over the rows of the batch, one segment per row and step.

In text order each row reads a *lane*, a contiguous stretch, so that the cache of a row is always the text just before
it. Shuffled, a row may get any segment. Either way each unread token is read once, and only the last step of a pass is
short.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from megatron_style.schedule.unread import Indices, Unread


@dataclass(frozen=True)
class Reading:
    """The tokens of some rows in one step: row i reads places[i, :lengths[i]] of the stream of its source."""

    places: Indices  # [rows, width]; beyond a row's length they repeat a valid place
    lengths: Indices  # [rows]
    sources: Indices  # [rows]; numbers in the order of data.train


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

    def read(self, turn: int, rows: Indices, width: int) -> tuple[Indices, Indices]:
        """Return the places and lengths of the rows' segments; see `Reading`."""
        firsts, lengths = self.extent(turn, rows)
        offsets = np.minimum(np.arange(width), np.maximum(lengths - 1, 0)[:, None])
        places = np.minimum(firsts[:, None] + offsets, self.unread.tokens - 1)
        return self.unread.in_stream(places), lengths

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
        return np.arange(self.rows + 1) * self.unread.tokens // self.rows


@dataclass(frozen=True)
class ShuffledSegments(Pass):
    key: tuple[int, ...]

    @property
    def steps(self) -> int:
        return _ceil_div(self._segments, self.rows)

    def extent(self, turn: int, rows: Indices) -> tuple[Indices, Indices]:
        order = _shuffled(self.key, self._segments)
        tokens = self.unread.tokens
        index = turn * self.rows + rows
        firsts = np.where(index < len(order), order[np.minimum(index, len(order) - 1)] * self.segment_length, tokens)
        return firsts, np.clip(tokens - firsts, 0, self.segment_length)

    @property
    def order_key(self) -> tuple[int, ...]:
        return self.key

    def tokens_before(self, turn: int) -> int:
        """Return the tokens of the turns before this one. All segments are full but the text's last, which may be read
        at any turn."""
        read = min(turn * self.rows, self._segments)
        missing = self._segments * self.segment_length - self.unread.tokens
        return read * self.segment_length - (missing if _place_of_last(self.key, self._segments) < read else 0)

    def after(self, turns: int) -> Unread:
        if turns >= self.steps:
            return Unread.entire(0)
        firsts = np.sort(_shuffled(self.key, self._segments)[turns * self.rows :]) * self.segment_length
        return self.unread.keep(firsts, np.minimum(firsts + self.segment_length, self.unread.tokens))

    @property
    def _segments(self) -> int:
        return _ceil_div(self.unread.tokens, self.segment_length)


@lru_cache(maxsize=1)  # a run reads one pass after the other, and an order may hold millions of segments
def _shuffled(key: tuple[int, ...], segments: int) -> Indices:
    """Return the segments in the order in which they are read."""
    return np.random.default_rng(key).permutation(segments)


@lru_cache(maxsize=16)
def _place_of_last(key: tuple[int, ...], segments: int) -> int:
    """Return the position of the text's last segment in that order."""
    return int(np.argmax(_shuffled(key, segments)))


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)
