"""The part of an epoch that has not been trained on yet, as a list of ranges of the token stream."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Unread:
    """Ranges of the token stream: range i is stream[starts[i]:stops[i]]. A *place* is an index into all of them, laid
    end to end. There may be millions, so what is computed over all is computed once."""

    starts: Indices
    stops: Indices

    @classmethod
    def entire(cls, tokens: int) -> Unread:
        return cls(np.array([0]), np.array([tokens]))

    @cached_property
    def tokens(self) -> int:
        return int((self.stops - self.starts).sum())

    def in_stream(self, places: Indices) -> Indices:
        """Return the indices of these places in the token stream."""
        begins = self._begins
        owner = np.searchsorted(begins, places, side="right") - 1
        return places - begins[owner] + self.starts[owner]

    def stretches_of(self, places: Indices) -> Indices:
        """Return the first token of the contiguous text in which each of these places is."""
        owner = np.searchsorted(self._begins, places, side="right") - 1
        return self.starts[self._firsts[owner]]

    def keep(self, starts: Indices, stops: Indices) -> Unread:
        """Return what remains when only the places starts[i]..stops[i] (ascending, disjoint) are still unread."""
        nonempty = stops > starts
        starts = starts[nonempty]
        stops = stops[nonempty]
        joints = self._begins[1:]
        owner = np.searchsorted(starts, joints, side="right") - 1
        inside = (owner >= 0) & (joints > starts[owner]) & (joints < stops[owner]) if len(starts) else joints < 0
        firsts = np.sort(np.concatenate([starts, joints[inside]]))
        lasts = np.sort(np.concatenate([stops, joints[inside]]))
        return Unread(self.in_stream(firsts), self.in_stream(lasts - 1) + 1)

    @cached_property
    def digest(self) -> str:
        """Return a digest that is the same for the same tokens, however they are cut into ranges."""
        apart = np.concatenate([[True], self.starts[1:] != self.stops[:-1], [True]])
        merged = np.concatenate([self.starts[apart[:-1]], self.stops[apart[1:]]])
        return hashlib.sha256(merged.astype("<i8").tobytes()).hexdigest()[:16]

    @cached_property
    def _firsts(self) -> Indices:
        """Return, for each range, the first of the ranges that touch one another up to it."""
        index = np.arange(len(self.starts))
        touches = np.concatenate([[False], self.starts[1:] == self.stops[:-1]])
        firsts: Indices = np.maximum.accumulate(np.where(touches, 0, index))
        return firsts

    @cached_property
    def _begins(self) -> Indices:
        """Return the place at which each range begins."""
        lengths = self.stops - self.starts
        begins: Indices = np.cumsum(lengths) - lengths
        return begins
