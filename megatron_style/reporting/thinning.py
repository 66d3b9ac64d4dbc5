"""Fewer points for a line, without losing what stands out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

MOST_POINTS = 600


class Point(NamedTuple):
    x: float
    y: float  # what is not finite is a gap in the line
    step: int


def thin(points: Sequence[Point], most: int = MOST_POINTS) -> tuple[Point, ...]:
    """At most so many: of each stretch its lowest, its highest and its first gap, and both ends of the line."""
    if len(points) <= most:
        return tuple(points)
    stretches = (most - 2) // 3
    kept = {0, len(points) - 1}
    for stretch in range(stretches):
        inside = range(stretch * len(points) // stretches, (stretch + 1) * len(points) // stretches)
        finite = [index for index in inside if math.isfinite(points[index].y)]
        if finite:
            kept |= {choose(finite, key=lambda index: points[index].y) for choose in (min, max)}
        kept |= set(next(([index] for index in inside if not math.isfinite(points[index].y)), []))
    return tuple(points[index] for index in sorted(kept))


def spread(points: Sequence[Point], most: int) -> tuple[Point, ...]:
    """At most so many, evenly over the line, its last one among them."""
    if len(points) <= most:
        return tuple(points)
    return tuple(points[(index + 1) * len(points) // most - 1] for index in range(most))
