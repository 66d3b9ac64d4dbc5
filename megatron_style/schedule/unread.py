"""What of an epoch has not been trained on yet: stretches of the token stream, laid end to end."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Places = NDArray[np.int64]


@dataclass(frozen=True)
class Unread:
    """Stretch i is stream[starts[i]:stops[i]]; a *place* counts through all stretches as if they were one. There may be
    millions of them, so what is computed over all is computed once."""

    starts: Places
    stops: Places

    @classmethod
    def whole(cls, tokens: int) -> Unread:
        return cls(np.array([0]), np.array([tokens]))

    @cached_property
    def tokens(self) -> int:
        return int((self.stops - self.starts).sum())

    def in_stream(self, places: Places) -> Places:
        """Where in the token stream these places are."""
        begins = self._begins
        stretch = np.searchsorted(begins, places, side="right") - 1
        return places - begins[stretch] + self.starts[stretch]

    def keep(self, starts: Places, stops: Places) -> Unread:
        """What remains when only the places starts[i]..stops[i] (ascending, apart) are still unread."""
        some = stops > starts
        starts, stops = starts[some], stops[some]
        joints = self._begins[1:]
        owner = np.searchsorted(starts, joints, side="right") - 1
        inside = (owner >= 0) & (joints > starts[owner]) & (joints < stops[owner]) if len(starts) else joints < 0
        firsts = np.sort(np.concatenate([starts, joints[inside]]))
        lasts = np.sort(np.concatenate([stops, joints[inside]]))
        return Unread(self.in_stream(firsts), self.in_stream(lasts - 1) + 1)

    @cached_property
    def digest(self) -> str:
        """The same for the same tokens, however they are cut into stretches."""
        apart = np.concatenate([[True], self.starts[1:] != self.stops[:-1], [True]])
        merged = np.concatenate([self.starts[apart[:-1]], self.stops[apart[1:]]])
        return hashlib.sha256(merged.astype("<i8").tobytes()).hexdigest()[:16]

    @cached_property
    def _begins(self) -> Places:
        """The place at which each stretch begins."""
        lengths = self.stops - self.starts
        begins: Places = np.cumsum(lengths) - lengths
        return begins
