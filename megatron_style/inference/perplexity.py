"""How well a model predicts a token stream, by a named protocol. Every token is scored once; sums are float64.

`nonoverlapping`: segments that know nothing of each other, many at once. `cached`: one walk through the text, each
segment attending to the one before.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_style.model.shortformer import Shortformer

Mode = Literal["nonoverlapping", "cached"]
Tokens = NDArray[np.integer]


@dataclass(frozen=True)
class Protocol:
    mode: Mode
    segment_length: int
    cache_length: int  # 0 unless the mode is cached
    batch_rows: int = 1

    @property
    def contexts(self) -> tuple[int, int]:
        """Fewest and most tokens a prediction sees, behind the first segment of the text."""
        return self.cache_length + 1, self.cache_length + self.segment_length


@dataclass(frozen=True)
class Score:
    nll: NDArray[np.float64]  # nats, one for each token of the stream, in its order

    @property
    def loss(self) -> float:
        return float(self.nll.mean())

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700))


@torch.no_grad()
def score(
    model: Shortformer,
    tokens: Tokens,
    protocol: Protocol,
    *,
    eos: int,
    progress: Callable[[int], object] = lambda _: None,
) -> Score:
    """The caches are local variables: scoring between two training steps changes nothing of the training."""
    nll = np.empty(len(tokens))
    cache = model.empty_cache(protocol.batch_rows, protocol.cache_length)
    L = protocol.segment_length
    window = L * protocol.batch_rows
    for start in range(0, len(tokens), window):
        count = min(window, len(tokens) - start)
        width = min(L, count)
        targets = _rows(tokens, start, count, width)
        inputs = np.empty_like(targets)
        inputs.reshape(-1)[1:] = targets.reshape(-1)[:-1]
        inputs[0, 0] = tokens[start - 1] if start else eos
        if cache.rows != len(targets):
            cache = model.empty_cache(len(targets), protocol.cache_length)
        scored, cache = model(*_on_device(model, inputs, targets), cache)
        nll[start : start + count] = scored.double().flatten()[:count].cpu().numpy()
        progress(count)
    return Score(nll)


def _rows(tokens: Tokens, start: int, count: int, width: int) -> NDArray[np.int64]:
    """`count` tokens as rows of `width`; the last row is filled up with its own last token, which nobody scores."""
    rows = -(-count // width)
    return np.pad(tokens[start : start + count].astype(np.int64), (0, rows * width - count), "edge").reshape(
        rows, width
    )


def _on_device(model: Shortformer, *arrays: NDArray[np.int64]) -> list[torch.Tensor]:
    return [torch.from_numpy(array).to(model.positions.table.device) for array in arrays]
