"""How well a model predicts a token stream, by a named protocol. Every token is scored once; sums are float64.

`nonoverlapping`: segments that know nothing of each other, many at once. `sliding`: windows that overlap, of which only
the last `stride` tokens count. `cached`: one walk through the text, each segment attending to the one before.
`token-by-token`: the same walk as when text is generated; it gives what `cached` gives.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_style.inference.decoder import Decoder
from megatron_style.model.shortformer import Shortformer

Mode = Literal["nonoverlapping", "sliding", "cached", "token-by-token"]
Tokens = NDArray[np.integer]
Progress = Callable[[int], object]


@dataclass(frozen=True)
class Protocol:
    mode: Mode
    segment_length: int
    cache_length: int = 0  # of the two modes that walk
    batch_rows: int = 1  # of the two that do not
    stride: int | None = None  # sliding; nonoverlapping is a stride of the whole segment

    @property
    def contexts(self) -> tuple[int, int]:
        """Fewest and most tokens a prediction sees, behind the first segment of the text."""
        if self.mode in ("cached", "token-by-token"):
            return self.cache_length + 1, self.cache_length + self.segment_length
        return self.segment_length - (self.stride or self.segment_length) + 1, self.segment_length


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
    model: Shortformer, tokens: Tokens, protocol: Protocol, *, eos: int, progress: Progress = lambda _: None
) -> Score:
    """The caches are local variables: scoring between two training steps changes nothing of the training."""
    stream = torch.from_numpy(np.concatenate([[eos], tokens]).astype(np.int64)).to(model.positions.table.device)
    inputs, targets = stream[:-1], stream[1:]  # the text begins as if a line had just ended
    match protocol.mode:
        case "cached":
            parts = _cached(model, inputs, targets, protocol)
        case "token-by-token":
            parts = _token_by_token(model, inputs, targets, protocol)
        case _:
            parts = _windows(model, inputs, targets, protocol)
    nll, done = np.empty(len(tokens)), 0
    for part in parts:
        nll[done : done + len(part)] = part.double().cpu().numpy()
        done += len(part)
        progress(len(part))
    assert done == len(tokens)
    return Score(nll)


def _windows(model: Shortformer, inputs: Tensor, targets: Tensor, protocol: Protocol) -> Iterator[Tensor]:
    """The first window counts whole, the others only their last `stride` tokens; the last may be short."""
    L, stride, total = protocol.segment_length, protocol.stride or protocol.segment_length, len(targets)
    first = min(L, total)
    yield _forward(model, inputs[None, :first], targets[None, :first])[0]
    for batch in _batched(range(first + stride, total + 1, stride), protocol.batch_rows):
        rows = torch.tensor([[end - L] for end in batch], device=inputs.device) + torch.arange(L, device=inputs.device)
        yield _forward(model, inputs[rows], targets[rows])[:, L - stride :].flatten()
    left = max(0, total - first) % stride
    if left:
        begin = total - left - (L - stride)
        yield _forward(model, inputs[None, begin:], targets[None, begin:])[0, L - stride :]


def _batched(items: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    return (items[first : first + size] for first in range(0, len(items), size))


def _forward(model: Shortformer, inputs: Tensor, targets: Tensor) -> Tensor:
    nll: Tensor = model(inputs, targets, model.empty_cache(len(inputs), 0))[0]
    return nll


def _cached(model: Shortformer, inputs: Tensor, targets: Tensor, protocol: Protocol) -> Iterator[Tensor]:
    cache = model.empty_cache(1, protocol.cache_length)
    for ids, wanted in zip(inputs.split(protocol.segment_length), targets.split(protocol.segment_length), strict=True):
        nll, cache = model(ids[None], wanted[None], cache)
        yield nll[0]


def _token_by_token(model: Shortformer, inputs: Tensor, targets: Tensor, protocol: Protocol) -> Iterator[Tensor]:
    decoder = Decoder(model, rows=1, segment_length=protocol.segment_length, cache_length=protocol.cache_length)
    for token, wanted in zip(inputs, targets, strict=True):
        features = decoder.feed(token.view(1, 1))
        yield model.vocabulary.nll(features[0], wanted.view(1), None)
