"""Scoring of a token stream by a named protocol. Every token is scored once; sums are float64.

The protocol alone cuts the work into units (batches of windows, lanes), and one rank computes each unit: the result
does not depend on the number of ranks.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby, islice, pairwise
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_style.base.errors import UserError
from megatron_style.config.model import EvaluationMode, ModelFolderConfig
from megatron_style.inference.decoder import Decoder
from megatron_style.model.attention import ATTENTIONS
from megatron_style.model.shortformer import Shortformer
from megatron_style.parallel.topology import Axis

Tokens = NDArray[np.integer]
Progress = Callable[[int], object]
_TOKENS_AT_ONCE = 4096  # in windows, unless --batch-rows is given
_Unit = TypeVar("_Unit")


@dataclass(frozen=True)
class Protocol:
    """The way in which a text is scored. A mode reads its own fields, and refuses the others if the user sets them."""

    mode: EvaluationMode
    segment_length: int
    cache_length: int = 0
    batch_rows: int = 1  # windows at once
    stride: int | None = None  # tokens of a window that count; None: all
    lanes: int = 1  # of a walk; one is exact, each further one starts with a limited context

    def contexts(self, tokens: int) -> tuple[int, int]:
        """Return the fewest and the most tokens that a prediction sees, after the first segment of a longer text."""
        if tokens <= self.segment_length:
            return 1, tokens
        return MODES[self.mode].contexts(self, tokens)

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
    tensor: int = 1


def make_protocol(request: Request, config: ModelFolderConfig, *, tokens: int, where: str) -> Protocol:
    """Return the protocol for a text of `tokens` tokens, or refuse a flag that the mode would ignore. `where` names the
    model in messages."""
    length = request.segment_length or config.segment_length
    for name in ("heads", "ffn_size"):
        size = getattr(config.model, name)
        if size % request.tensor:
            raise UserError(f"--tensor {request.tensor}: must divide the model's {name} ({size})")
    return MODES[request.mode].protocol(request, config, length, tokens=tokens, where=where)


@dataclass(frozen=True)
class Score:
    nll: NDArray[np.float64]  # in nats, for each token of the stream

    @property
    def loss(self) -> float:
        return float(self.nll.mean())

    @property
    def perplexity(self) -> float:
        return perplexity(self.loss)

    def by_place(self, protocol: Protocol) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return the number of tokens scored at each position of the segment, and their mean loss (nan for none)."""
        places = protocol.places(len(self.nll))
        counts = np.bincount(places)
        sums = np.bincount(places, self.nll)
        return counts, np.divide(sums, counts, out=np.full(len(counts), np.nan), where=counts > 0)

    def by_band(self, protocol: Protocol, bands: int = 16) -> list[float]:
        """Return the mean loss over equal stretches of the segment, or at each position of a shorter one."""
        counts, losses = self.by_place(protocol)
        cut = np.array_split(np.arange(len(counts)), min(bands, len(counts)))
        return [float(np.average(losses[places], weights=counts[places])) for places in cut]


def perplexity(loss: float) -> float:
    return math.exp(min(loss, 700))


class _Text(NamedTuple):
    inputs: Tensor
    targets: Tensor


_Scored = Iterator[tuple[int, Tensor]]  # the index of the first target in the stream, and the losses from there on


class Mode(ABC):
    """How a text is cut, and the context of each prediction. A new mode is a class and a row of `MODES`."""

    @abstractmethod
    def protocol(
        self, request: Request, config: ModelFolderConfig, length: int, *, tokens: int, where: str
    ) -> Protocol:
        """Return the protocol of the request, or refuse what this mode cannot do."""

    @abstractmethod
    def contexts(self, protocol: Protocol, tokens: int) -> tuple[int, int]:
        """Return the fewest and the most tokens that a prediction sees."""

    @abstractmethod
    def score(self, model: Shortformer, text: _Text, protocol: Protocol, axis: Axis) -> _Scored:
        """Yield the losses of this rank's units."""


class Nonoverlapping(Mode):
    """Independent segments, many at once."""

    def protocol(
        self, request: Request, config: ModelFolderConfig, length: int, *, tokens: int, where: str
    ) -> Protocol:
        del config, tokens, where
        _refuse(request, "cache_length", "lanes", needs="cached or token-by-token")
        stride = self._stride(request, length)
        batch_rows = request.batch_rows or max(1, _TOKENS_AT_ONCE // length)
        return Protocol(request.mode, length, batch_rows=batch_rows, stride=stride)

    def _stride(self, request: Request, length: int) -> int | None:
        del length
        _refuse(request, "stride", needs="sliding")
        return None

    def contexts(self, protocol: Protocol, tokens: int) -> tuple[int, int]:
        del tokens
        L = protocol.segment_length
        return L - (protocol.stride or L) + 1, L

    def score(self, model: Shortformer, text: _Text, protocol: Protocol, axis: Axis) -> _Scored:
        for batch in _share(_batches(len(text.targets), protocol), axis):
            inputs = torch.stack([text.inputs[window.begin : window.end] for window in batch])
            targets = torch.stack([text.targets[window.counted : window.end] for window in batch])
            output = model(inputs, targets, model.empty_memory(len(batch), 0))
            for window, row in zip(batch, output.nll, strict=True):
                yield window.counted, row


class Sliding(Nonoverlapping):
    """Windows that overlap, of which only the last `stride` tokens count."""

    def _stride(self, request: Request, length: int) -> int | None:
        if request.stride is None:
            raise UserError("--mode sliding needs --stride S: how many tokens of each window count")
        if request.stride > length:
            raise UserError(f"--stride {request.stride} must not be above the segment length of {length}")
        return request.stride


class Cached(Mode):
    """One walk through the text, in which each segment attends to the previous one. A walk can be cut into lanes, each
    warmed by the text before it."""

    def protocol(
        self, request: Request, config: ModelFolderConfig, length: int, *, tokens: int, where: str
    ) -> Protocol:
        _refuse(request, "stride", needs="sliding")
        if not config.model.cache and not ATTENTIONS[config.model.positions].can_decode:
            raise UserError(
                f"{where}: was trained with added positions and no cache, and --mode {request.mode} would ruin it "
                f"(the paper measured a perplexity of 41.59 that way); use --mode nonoverlapping"
            )
        if request.batch_rows not in (None, 1):
            given = f"--batch-rows {request.batch_rows}"
            raise UserError(f"{given}: {request.mode} mode walks in one row; --lanes cuts the walk")
        lanes = request.lanes or 1
        segments = -(-tokens // length)
        if lanes > segments:
            raise UserError(f"--lanes {lanes}: the text has only {segments} segments of {length}")
        cache_length = request.cache_length or config.cache_length or length
        return Protocol(request.mode, length, cache_length=cache_length, lanes=lanes)

    def contexts(self, protocol: Protocol, tokens: int) -> tuple[int, int]:
        most = protocol.cache_length + protocol.segment_length
        return protocol.cache_length + 1, min(tokens, most)

    def score(self, model: Shortformer, text: _Text, protocol: Protocol, axis: Axis) -> _Scored:
        for lane in _share(_cut_lanes(len(text.targets), protocol), axis):
            memory = model.empty_memory(1, protocol.cache_length)
            for begin in range(_warm_from(lane, protocol), lane.stop, protocol.segment_length):
                segment = slice(begin, min(begin + protocol.segment_length, lane.stop))
                output = model(text.inputs[None, segment], text.targets[None, segment], memory)
                memory = output.memory
                if begin in lane:
                    yield begin, output.nll[0]


class TokenByToken(Cached):
    """The walk of `cached` with the decoder that generates text; it gives the same losses."""

    def protocol(
        self, request: Request, config: ModelFolderConfig, length: int, *, tokens: int, where: str
    ) -> Protocol:
        found = super().protocol(request, config, length, tokens=tokens, where=where)
        if not ATTENTIONS[config.model.positions].can_decode:
            kind = config.model.positions
            raise UserError(f"{where}: has {kind} positions, so a cached token cannot be read again; use --mode cached")
        if request.tensor > 1:
            raise UserError(f"--tensor {request.tensor}: use --mode cached, which gives the same as token-by-token")
        return found

    def score(self, model: Shortformer, text: _Text, protocol: Protocol, axis: Axis) -> _Scored:
        for lane in _share(_cut_lanes(len(text.targets), protocol), axis):
            decoder = Decoder(model, rows=1, segment_length=protocol.segment_length, cache_length=protocol.cache_length)
            if warm := text.inputs[_warm_from(lane, protocol) : lane.start].tolist():
                decoder.read(warm)
            for place in lane:
                features = decoder.step(text.inputs[place : place + 1])
                yield place, model.vocabulary.nll(features, text.targets[place : place + 1], None)


MODES: Mapping[EvaluationMode, Mode] = {
    "nonoverlapping": Nonoverlapping(),
    "sliding": Sliding(),
    "cached": Cached(),
    "token-by-token": TokenByToken(),
}


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
    """Score a text. Memories are local variables: scoring between two training steps does not change the training.

    The units are divided among the ranks of `axis`; each rank gets the complete score."""
    stream = torch.from_numpy(np.concatenate([[eos], tokens]).astype(np.int64)).to(model.positions.table.device)
    text = _Text(stream[:-1], stream[1:])  # the text starts as if a line had just ended
    nll = torch.zeros(len(tokens), dtype=torch.float64, device=stream.device)
    times = torch.zeros(len(tokens), dtype=torch.int8, device=stream.device)
    for first, part in MODES[protocol.mode].score(model, text, protocol, axis):
        nll[first : first + len(part)] = part
        times[first : first + len(part)] += 1
        progress(len(part))
    assert bool((axis.sum(times) == 1).all()), "a token was scored twice, or never"
    return Score(axis.sum(nll).cpu().numpy())


class _Window(NamedTuple):
    begin: int
    counted: int  # the first token that counts
    end: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.end - self.begin, self.end - self.counted


def _batches(total: int, protocol: Protocol) -> Iterator[list[_Window]]:
    """Yield batches of windows of one shape."""
    windows = _cut_windows(total, protocol.segment_length, protocol.stride or protocol.segment_length)
    for _, alike in groupby(windows, key=lambda window: window.shape):
        same = list(alike)
        for first in range(0, len(same), protocol.batch_rows):
            yield same[first : first + protocol.batch_rows]


def _refuse(request: Request, *flags: str, needs: str) -> None:
    for flag in flags:
        if getattr(request, flag) is not None:
            name = f"--{flag.replace('_', '-')} {getattr(request, flag)}"
            raise UserError(f"{name} needs --mode {needs}, not {request.mode}")


def _cut_windows(total: int, L: int, stride: int) -> Iterator[_Window]:
    """Yield windows: the first counts in full, the others only by their last `stride` tokens; the last may be short."""
    yield _Window(0, 0, min(L, total))
    for counted in range(L, total, stride):
        yield _Window(counted - (L - stride), counted, min(counted + stride, total))


def _cut_lanes(total: int, protocol: Protocol) -> list[range]:
    """Return contiguous lanes of full segments, as equal as possible."""
    L = protocol.segment_length
    segments = -(-total // L)
    edges = [segments * lane // protocol.lanes * L for lane in range(protocol.lanes)] + [total]
    return [range(*edge) for edge in pairwise(edges)]


def _warm_from(lane: range, protocol: Protocol) -> int:
    """Return the token at which a lane must start to read, so that its memory is full at its first token."""
    before = -(-protocol.cache_length // protocol.segment_length)
    return max(0, lane.start - before * protocol.segment_length)


def _share(units: Iterable[_Unit], axis: Axis) -> Iterator[_Unit]:
    return islice(units, axis.rank, None, axis.size)
