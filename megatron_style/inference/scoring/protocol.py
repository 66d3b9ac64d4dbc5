"""The way in which a text is scored, and the flags that ask for it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_style.config.model import EvaluationMode
from megatron_style.model.memory import UNLIMITED, Reach

TOKENS_AT_ONCE = 4096  # unless --batch-rows is given


@dataclass(frozen=True)
class Protocol:
    """The way in which a text is scored. A mode reads its own fields, and refuses the others if the user sets them."""

    mode: EvaluationMode
    segment_length: int
    cache_length: int = 0
    compressed: int = 0  # tokens before the cache of which a compressed memory is made
    batch_rows: int = 1  # windows, segments of the one lane, or lanes at once
    stride: int | None = None  # tokens of a window that count; None: all
    lanes: int = 1  # of a walk; one is exact, each further one starts with a limited context
    reach: Reach = UNLIMITED  # of relative positions

    def places(self, tokens: int) -> NDArray[np.int64]:
        """Return the position in its segment or window, from 0, at which each token of the stream is scored."""
        L = self.segment_length
        stride = self.stride or L
        index = np.arange(tokens)
        return np.where(index < L, index, L - stride + (index - L) % stride)


@dataclass(frozen=True)
class Request:
    """The flags of `evaluate`; None: the mode's default."""

    mode: EvaluationMode
    segment_length: int | None = None
    stride: int | None = None
    cache_length: int | None = None
    batch_rows: int | None = None
    lanes: int | None = None
    same_length: bool | None = None
    clamp_distance: int | None = None
    tensor: int = 1


def rows_at_once(length: int) -> int:
    """Return the number of segments or windows of a pass that keeps a device busy."""
    return max(1, TOKENS_AT_ONCE // length)
