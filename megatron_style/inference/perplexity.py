"""How well a model predicts a token stream, by a named protocol. Every token is scored once; sums are float64.

`nonoverlapping`: segments that know nothing of each other, many at once. `sliding`: windows that overlap, of which only
the last `stride` tokens count. `cached`: one walk through the text, each segment attending to the one before.
`token-by-token`: the same walk as when text is generated; it gives what `cached` gives. A walk can be cut into lanes,
each warmed by the text before it.

The work is cut into units (batches of windows, lanes) by the protocol alone and dealt out to the ranks whole: any
number of ranks computes the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby, islice, pairwise
from typing import Literal, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_style.inference.decoder import Decoder
from megatron_style.model.shortformer import Shortformer
from megatron_style.parallel.topology import Axis

Mode = Literal["nonoverlapping", "sliding", "cached", "token-by-token"]
Tokens = NDArray[np.integer]
Progress = Callable[[int], object]
_Unit = TypeVar("_Unit")


@dataclass(frozen=True)
class Protocol:
    mode: Mode
    segment_length: int
    cache_length: int = 0  # of the two modes that walk
    batch_rows: int = 1  # of the two that do not
    stride: int | None = None  # sliding; nonoverlapping is a stride of the whole segment
    lanes: int = 1  # of the two that walk; one is exact, each further one begins with less than all text before it

    def contexts(self, tokens: int) -> tuple[int, int]:
        """Fewest and most tokens that a prediction sees, behind the first segment of the text where it is longer."""
        if tokens <= self.segment_length:
            return 1, tokens
        if self.mode in ("cached", "token-by-token"):
            return self.cache_length + 1, min(tokens, self.cache_length + self.segment_length)
        return self.segment_length - (self.stride or self.segment_length) + 1, self.segment_length

    def places(self, tokens: int) -> NDArray[np.int64]:
        """Where in its segment (or window) each token of the stream is scored, from 0."""
        L, stride = self.segment_length, self.stride or self.segment_length
        index = np.arange(tokens)
        return np.where(index < L, index, L - stride + (index - L) % stride)


@dataclass(frozen=True)
class Score:
    nll: NDArray[np.float64]  # nats, one for each token of the stream, in its order

    @property
    def loss(self) -> float:
        return float(self.nll.mean())

    @property
    def perplexity(self) -> float:
        return perplexity(self.loss)

    def by_place(self, protocol: Protocol) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """How many tokens were scored at each place of a segment, and their mean loss (nan where none was)."""
        places = protocol.places(len(self.nll))
        counts, sums = np.bincount(places), np.bincount(places, self.nll)
        return counts, np.divide(sums, counts, out=np.full(len(counts), np.nan), where=counts > 0)

    def by_band(self, protocol: Protocol, bands: int = 16) -> list[float]:
        """Mean loss over so many equal stretches of the segment, or over each place of one that is shorter."""
        counts, losses = self.by_place(protocol)
        cut = np.array_split(np.arange(len(counts)), min(bands, len(counts)))
        return [float(np.average(losses[places], weights=counts[places])) for places in cut]


def perplexity(loss: float) -> float:
    return math.exp(min(loss, 700))


class _Text(NamedTuple):
    inputs: Tensor
    targets: Tensor


_Scored = Iterator[tuple[int, Tensor]]  # the place of the first target in the stream, and losses from there


@torch.no_grad()
def score(
    model: Shortformer,
    tokens: Tokens,
    protocol: Protocol,
    *,
    eos: int,
    axis: Axis = Axis(),  # noqa: B008  frozen
    progress: Progress = lambda _: None,
) -> Score:
    """The caches are local variables: scoring between two training steps changes nothing of the training.

    `axis` is what the units are dealt out over; each of its ranks gets the whole score."""
    stream = torch.from_numpy(np.concatenate([[eos], tokens]).astype(np.int64)).to(model.positions.table.device)
    text = _Text(stream[:-1], stream[1:])  # the text begins as if a line had just ended
    nll = torch.zeros(len(tokens), dtype=torch.float64, device=stream.device)
    times = torch.zeros(len(tokens), dtype=torch.int8, device=stream.device)
    follow = {"cached": _cached, "token-by-token": _token_by_token}.get(protocol.mode, _windows)
    for first, part in follow(model, text, protocol, axis):
        nll[first : first + len(part)] = part
        times[first : first + len(part)] += 1
        progress(len(part))
    assert bool((axis.sum(times) == 1).all()), "a token was scored twice, or never"
    return Score(axis.sum(nll).cpu().numpy())


class _Window(NamedTuple):
    begin: int
    counted: int  # from here to the end its tokens count
    end: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.end - self.begin, self.end - self.counted


def _windows(model: Shortformer, text: _Text, protocol: Protocol, axis: Axis) -> _Scored:
    cut = _cut_windows(len(text.targets), protocol.segment_length, protocol.stride or protocol.segment_length)
    same = (list(alike) for _, alike in groupby(cut, key=lambda window: window.shape))
    batches = (alike[i : i + protocol.batch_rows] for alike in same for i in range(0, len(alike), protocol.batch_rows))
    for batch in _share(batches, axis):
        inputs = torch.stack([text.inputs[window.begin : window.end] for window in batch])
        targets = torch.stack([text.targets[window.counted : window.end] for window in batch])
        nll, _ = model(inputs, targets, model.empty_memory(len(batch), 0))
        for window, row in zip(batch, nll, strict=True):
            yield window.counted, row


def _cut_windows(total: int, L: int, stride: int) -> Iterator[_Window]:
    """The first window counts whole, the others only their last `stride` tokens; the last may be short."""
    yield _Window(0, 0, min(L, total))
    for counted in range(L, total, stride):
        yield _Window(counted - (L - stride), counted, min(counted + stride, total))


def _cached(model: Shortformer, text: _Text, protocol: Protocol, axis: Axis) -> _Scored:
    for lane in _share(_cut_lanes(len(text.targets), protocol), axis):
        cache = model.empty_memory(1, protocol.cache_length)
        for begin in range(_warm_from(lane, protocol), lane.stop, protocol.segment_length):
            segment = slice(begin, min(begin + protocol.segment_length, lane.stop))
            nll, cache = model(text.inputs[None, segment], text.targets[None, segment], cache)
            if begin in lane:
                yield begin, nll[0]


def _token_by_token(model: Shortformer, text: _Text, protocol: Protocol, axis: Axis) -> _Scored:
    for lane in _share(_cut_lanes(len(text.targets), protocol), axis):
        decoder = Decoder(model, rows=1, segment_length=protocol.segment_length, cache_length=protocol.cache_length)
        if warm := text.inputs[_warm_from(lane, protocol) : lane.start].tolist():
            decoder.read(warm)
        for place in lane:
            features = decoder.step(text.inputs[place : place + 1])
            yield place, model.vocabulary.nll(features, text.targets[place : place + 1], None)


def _cut_lanes(total: int, protocol: Protocol) -> list[range]:
    """Contiguous, of whole segments, as equal as can be."""
    L = protocol.segment_length
    segments = -(-total // L)
    edges = [segments * lane // protocol.lanes * L for lane in range(protocol.lanes)] + [total]
    return [range(*edge) for edge in pairwise(edges)]


def _warm_from(lane: range, protocol: Protocol) -> int:
    """As many segments back as fill the cache."""
    behind = -(-protocol.cache_length // protocol.segment_length)
    return max(0, lane.start - behind * protocol.segment_length)


def _share(units: Iterable[_Unit], axis: Axis) -> Iterator[_Unit]:
    return islice(units, axis.rank, None, axis.size)
