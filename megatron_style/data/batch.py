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
