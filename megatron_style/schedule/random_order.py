"""A random order of segments, of which any part can be computed without the rest.

Up to `GROUP` segments are one permutation. A longer text is cut into strips of `STRIP` adjacent segments; the strips
are shuffled and dealt into groups of `GROUP` segments, and each group is shuffled by itself. So a group has strips from
all over the text, memory is bounded by a group and the list of strips, and what is left unread is a list of strips.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from megatron_style.schedule.unread import Indices

GROUP = 1 << 22
STRIP = 1 << 14


@dataclass(frozen=True)
class RandomOrder:
    """The numbers 0..count - 1 in a random order that the key decides."""

    key: tuple[int, ...]
    count: int
    group: int = GROUP
    strip: int = STRIP

    @property
    def settings(self) -> tuple[int, ...]:
        """Return what decides the order in addition to key and count."""
        return (self.group, self.strip) if self._has_groups else ()

    def at(self, places: Indices) -> Indices:
        """Return the numbers at these places of the order."""
        numbers = np.empty(len(places), np.int64)
        groups = places // self.group
        for group in np.unique(groups).tolist():
            mine = groups == group
            numbers[mine] = self._numbers(group, self._order_of(group)[places[mine] - group * self.group])
        return numbers

    @cached_property
    def place_of_last(self) -> int:
        """Return the place of the largest number, which is the last member of the last group."""
        last = (self.count - 1) // self.group
        return last * self.group + int(np.argmax(self._order_of(last)))

    def rest(self, place: int) -> tuple[Indices, Indices]:
        """Return the numbers from this place of the order on, as ascending ranges firsts[i]..lasts[i]."""
        group = place // self.group
        members = self._numbers(group, self._order_of(group)[place - group * self.group :])
        strips = self._strips[(group + 1) * self.group // self.strip :] * self.strip
        firsts = np.concatenate([members, strips])
        lasts = np.concatenate([members + 1, np.minimum(strips + self.strip, self.count)])
        ascending = np.argsort(firsts)
        return firsts[ascending], lasts[ascending]

    def _order_of(self, group: int) -> Indices:
        """Return the members of a group, counted from 0, in their order."""
        size = min(self.group, self.count - group * self.group)
        return _permutation((*self.key, group) if self._has_groups else self.key, size)

    def _numbers(self, group: int, members: Indices) -> Indices:
        """Return the numbers of members of a group, which lie in its strips one after the other."""
        if not self._has_groups:
            return members
        strips = self._strips[group * self.group // self.strip :]
        return strips[members // self.strip] * self.strip + members % self.strip

    @cached_property
    def _strips(self) -> Indices:
        """Return the strips in their order. The last one, which may be short, stays last, so that all others fill."""
        if not self._has_groups:
            return np.arange(0)
        last = (self.count - 1) // self.strip
        groups = -(-self.count // self.group)
        return np.append(np.random.default_rng((*self.key, groups)).permutation(last), last)

    @property
    def _has_groups(self) -> bool:
        return self.count > self.group


def _permutation(key: tuple[int, ...], count: int) -> Indices:
    return _permutations_of(key[0])(key[1:], count)


@lru_cache
def _permutations_of(text: int) -> Callable[[tuple[int, ...], int], Indices]:
    """Return a cache for each text, because a step reads all sources of a blend. A run reads one group of a text after
    the other, and a step may cross into the next."""
    return lru_cache(maxsize=2)(lambda key, count: np.random.default_rng((text, *key)).permutation(count))
