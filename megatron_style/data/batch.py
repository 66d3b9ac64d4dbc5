"""From places in the token stream to a batch of inputs and targets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_style.schedule.passes import Reading


@dataclass(frozen=True)
class Batch:
    inputs: NDArray[np.int64]  # [rows, width]: the token before each target
    targets: NDArray[np.int64]
    counted: NDArray[np.bool_]  # false where a row is shorter than the batch is wide


def read_batch(streams: Sequence[NDArray[Any]], reading: Reading, *, eos: int) -> Batch:
    """Read each row from the stream of its source."""
    places = reading.places
    before = np.empty(places.shape, np.int64)
    targets = np.empty(places.shape, np.int64)
    for source in np.unique(reading.sources):
        own = reading.sources == source
        before[own] = streams[source][np.maximum(places[own] - 1, 0)]
        targets[own] = streams[source][places[own]]
    return Batch(
        inputs=np.where(places > 0, before, eos),  # a source starts as if a line had just ended
        targets=targets,
        counted=np.arange(places.shape[1]) < reading.lengths[:, None],
    )


def ages_in_lanes(
    streams: Sequence[NDArray[Any]], reading: Reading, document_end: int, cache_length: int
) -> NDArray[np.int64]:
    """Return the age of each input: the number of inputs of its row since the last end of a document, or since the text
    of the row jumps. The inputs before the segment are looked at as far as the cache reaches."""
    ages = np.zeros_like(reading.places)
    for row, places in enumerate(reading.places):
        first = int(places[0])
        before = np.arange(max(int(reading.stretches[row]), first - cache_length), first)
        lane = np.concatenate([before, places])
        starts = streams[reading.sources[row]][np.maximum(lane - 1, 0)] == document_end
        starts |= np.diff(lane, prepend=lane[0] - 1) != 1
        starts[0] |= lane[0] == reading.stretches[row]
        index = np.arange(len(lane))
        # Without a start, all of the cache is seen.
        last = np.maximum.accumulate(np.where(starts, index, -cache_length))
        ages[row] = (index - last)[len(before) :]
    return ages
