"""The memory of arrays: numpy's and torch's, but not that of mapped files."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from megatron_style.rehearsal.live_bytes import LiveBytes


@contextmanager
def peak_of_arrays() -> Iterator[Callable[[], int]]:
    """Yield a function that returns the peak in bytes, at most: arrays that torch borrows from numpy count twice."""
    tracemalloc.start()
    try:
        with LiveBytes() as tensors:
            yield lambda: tracemalloc.get_traced_memory()[1] + tensors.peak
    finally:
        tracemalloc.stop()
