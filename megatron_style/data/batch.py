"""From places in the token stream to a batch of inputs and targets."""

from __future__ import annotations

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


def read_batch(tokens: NDArray[Any], reading: Reading, *, eos: int) -> Batch:
    places = reading.places
    before = tokens[np.maximum(places - 1, 0)].astype(np.int64)
    return Batch(
        inputs=np.where(places > 0, before, eos),  # the corpus starts as if a line had just ended
        targets=tokens[places].astype(np.int64),
        counted=np.arange(places.shape[1]) < reading.lengths[:, None],
    )


def ages_in_lanes(tokens: NDArray[Any], reading: Reading, document_end: int, cache_length: int) -> NDArray[np.int64]:
    """Return the age of each input: the number of inputs of its row since the last end of a document, or since the text
    of the row jumps. The inputs before the segment are looked at as far as the cache reaches."""
    ages = np.zeros_like(reading.places)
    for row, places in enumerate(reading.places):
        first = int(places[0])
        before = np.arange(max(int(reading.stretches[row]), first - cache_length), first)
        lane = np.concatenate([before, places])
        starts = tokens[np.maximum(lane - 1, 0)] == document_end
        starts |= np.diff(lane, prepend=lane[0] - 1) != 1
        starts[0] |= lane[0] == reading.stretches[row]
        index = np.arange(len(lane))
        last = np.maximum.accumulate(
            np.where(starts, index, -cache_length)
        )  # without a start, all of the cache is seen
        ages[row] = (index - last)[len(before) :]
    return ages
