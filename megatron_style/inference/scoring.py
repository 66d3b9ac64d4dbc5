"""Scoring of a token stream by a named protocol. Every token is scored once; sums are float64.

The protocol alone cuts the work into passes of fixed shapes, and one rank computes each pass: the result does not
depend on the number of ranks.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, islice, pairwise
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from megatron_style.base.errors import UserError
from megatron_style.config.model import EvaluationMode, ModelFolderConfig
from megatron_style.inference.decoder import Decoder
from megatron_style.model.attention import attention_of
from megatron_style.model.chain import ChainedMemory
from megatron_style.model.memory import UNLIMITED, Memory, Reach
from megatron_style.model.shortformer import Shortformer
from megatron_style.parallel.topology import Axis

Tokens = NDArray[np.integer]
Progress = Callable[[int], object]
KeepKeys = Callable[[int, Tensor], object]  # called with the index of the first token, and the keys [tokens, D]
TOKENS_AT_ONCE = 4096  # unless --batch-rows is given
_Unit = TypeVar("_Unit")


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

    @property
    def chained_rows(self) -> int:
        """Return the number of consecutive segments at once: at least as many as a memory is made of."""
        return max(self.batch_rows, -(-max(self.cache_length, self.compressed) // self.segment_length))

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
    same_length: bool | None = None
    clamp_distance: int | None = None
    tensor: int = 1


def make_protocol(request: Request, config: ModelFolderConfig, *, tokens: int, where: str) -> Protocol:
    """Return the protocol for a text of `tokens` tokens, or refuse a flag that the mode would ignore. `where` names the
    model in messages."""
    length = request.segment_length or config.segment_length
    config.model.check_segment(length, "--segment-length")
    if problem := config.model.foresight:
        raise UserError(f"{where}: {problem}")
    for name, size in config.model.split_sizes.items():
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


class _Window(NamedTuple):
    begin: int
    counted: int  # the first token that counts
    end: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.end - self.begin, self.end - self.counted


class Part(NamedTuple):
    """The results of a stretch of the text."""

    first: int  # the index of its first token in the stream
    nll: Tensor  # of each token; empty if only keys are wanted
    keys: Tensor | None  # [tokens, D], if they are wanted


@dataclass(frozen=True)
class Reader:
    """A model, and the text that it reads. The text may be a mapped file: only what is read is in memory."""

    model: Shortformer
    tokens: Tokens
    eos: int
    wants_losses: bool = True
    wants_keys: bool = False

    def inputs(self, begin: int, end: int) -> Tensor:
        """Return what comes before each of these tokens. The text starts as if a line had just ended."""
        before = self.tokens[max(0, begin - 1) : end - 1].astype(np.int64)
        ids = before if begin else np.concatenate([[self.eos], before])
        return torch.from_numpy(ids).to(self.model.positions.table.device)

    def targets(self, begin: int, end: int) -> Tensor:
        ids = torch.from_numpy(self.tokens[begin:end].astype(np.int64))
        return (ids if self.wants_losses else ids[:0]).to(self.model.positions.table.device)

    def read(self, windows: Sequence[_Window], memory: Memory, length: int = 0) -> tuple[list[Part], Memory]:
        """Read windows after what is in the memory. All begin to count at the same place. Shorter ones than the longest
        or `length` are padded at their end, which no token before that sees."""
        longest = max(length, *(window.end - window.begin for window in windows))
        inputs = torch.stack([_padded(self.inputs(w.begin, w.end), longest) for w in windows])
        counted = longest - (windows[0].counted - windows[0].begin) if self.wants_losses else 0
        targets = torch.stack([_padded(self.targets(w.counted, w.end), counted) for w in windows])
        output = self.model(inputs, targets, memory, key=self.wants_keys)
        parts = []
        for row, window in enumerate(windows):
            tokens, counted = window.shape
            keys = None if output.key is None else output.key[row, tokens - counted : tokens]
            parts.append(Part(window.counted, output.nll[row, :counted], keys))
        return parts, output.memory


class Mode(ABC, Generic[_Unit]):
    """How a text is cut into units, and the context of each prediction. A new mode is a class and a row of `MODES`."""

    @abstractmethod
    def protocol(
        self, request: Request, config: ModelFolderConfig, length: int, *, tokens: int, where: str
    ) -> Protocol:
        """Return the protocol of the request, or refuse what this mode cannot do."""

    @abstractmethod
    def contexts(self, protocol: Protocol, tokens: int) -> tuple[int, int]:
        """Return the fewest and the most tokens that a prediction sees."""

    @abstractmethod
    def units(self, tokens: int, protocol: Protocol) -> Iterable[_Unit]:
        """Return the units of a text, in stream order."""

    @abstractmethod
    def read(self, reader: Reader, protocol: Protocol, unit: _Unit) -> Iterator[Part]:
        """Yield the results of a unit."""

    @abstractmethod
    def read_share(self, reader: Reader, protocol: Protocol, axis: Axis) -> Iterator[Part]:
        """Yield this rank's share of the results. All ranks have to call it together."""

    def _read_units(self, reader: Reader, protocol: Protocol, axis: Axis) -> Iterator[Part]:
        for unit in share(self.units(len(reader.tokens), protocol), axis):
            yield from self.read(reader, protocol, unit)


class Nonoverlapping(Mode[list[_Window]]):
    """Independent segments, many at once."""

    def protocol(
        self, request: Request, config: ModelFolderConfig, length: int, *, tokens: int, where: str
    ) -> Protocol:
        del config, tokens, where
        walk_only = ("cache_length", "lanes", "same_length", "clamp_distance")
        _refuse(request, *walk_only, needs="cached or token-by-token")
        stride = self._stride(request, length)
        batch_rows = request.batch_rows or rows_at_once(length)
        return Protocol(request.mode, length, batch_rows=batch_rows, stride=stride)

    def _stride(self, request: Request, length: int) -> int | None:
        del length
        _refuse(request, "stride", needs="sliding")
        return None

    def contexts(self, protocol: Protocol, tokens: int) -> tuple[int, int]:
        del tokens
        L = protocol.segment_length
        return L - (protocol.stride or L) + 1, L

    def units(self, tokens: int, protocol: Protocol) -> Iterable[list[_Window]]:
        return _batches(tokens, protocol)

    def read(self, reader: Reader, protocol: Protocol, unit: list[_Window]) -> Iterator[Part]:
        del protocol
        parts, _ = reader.read(unit, reader.model.empty_memory(len(unit), 0))
        yield from parts

    def read_share(self, reader: Reader, protocol: Protocol, axis: Axis) -> Iterator[Part]:
        """Yield this rank's share. All ranks make equally many passes, because under ZeRO 3 each needs all others: one
        that has no unit left repeats that of the first rank, without a result."""
        units = iter(self.units(len(reader.tokens), protocol))
        while turn := list(islice(units, axis.size)):
            has_unit = axis.rank < len(turn)
            parts = list(self.read(reader, protocol, turn[axis.rank if has_unit else 0]))
            yield from parts if has_unit else ()


class Sliding(Nonoverlapping):
    """Windows that overlap, of which only the last `stride` tokens count."""

    def _stride(self, request: Request, length: int) -> int | None:
        if request.stride is None:
            raise UserError("--mode sliding needs --stride S: how many tokens of each window count")
        if request.stride > length:
            raise UserError(f"--stride {request.stride} must not be above the segment length of {length}")
        return request.stride


class Cached(Mode[list[range]]):
    """One walk through the text, in which each segment attends to the previous one. The walk reads consecutive segments
    at once, on all ranks. It can be cut into lanes instead, each warmed by the text before it."""

    def protocol(
        self, request: Request, config: ModelFolderConfig, length: int, *, tokens: int, where: str
    ) -> Protocol:
        _refuse(request, "stride", needs="sliding")
        if not config.model.cache and not attention_of(config.model).can_decode:
            raise UserError(
                f"{where}: was trained with added positions and no cache, and --mode {request.mode} would ruin it "
                f"(the paper measured a perplexity of 41.59 that way); use --mode nonoverlapping"
            )
        lanes = request.lanes or 1
        segments = -(-tokens // length)
        if lanes > segments:
            raise UserError(f"--lanes {lanes}: the text has only {segments} segments of {length}")
        cache_length = request.cache_length or config.cache_length or length
        reach = self._reach(request, config, cache_length, where)
        memory = config.model.memory
        compressed = 0 if memory is None else memory.compressed * memory.rate
        batch_rows = request.batch_rows or self._rows(length, lanes)
        return Protocol(
            request.mode,
            length,
            cache_length=cache_length,
            compressed=compressed,
            batch_rows=batch_rows,
            lanes=lanes,
            reach=reach,
        )

    def _rows(self, length: int, lanes: int) -> int:
        """Return the default number of rows."""
        most = rows_at_once(length)
        return most if lanes == 1 else min(lanes, most)

    def _reach(self, request: Request, config: ModelFolderConfig, cache_length: int, where: str) -> Reach:
        for flag in ("same_length", "clamp_distance"):
            if getattr(request, flag) is not None and config.model.positions != "relative":
                name = f"--{flag.replace('_', '-')}"
                raise UserError(f"{name}: needs relative positions, and {where} has {config.model.positions} ones")
            if getattr(request, flag) is not None and config.model.memory is not None:
                name = f"--{flag.replace('_', '-')}"
                raise UserError(f"{name}: is about distances of tokens, and {where} has a compressed memory; remove it")
        return Reach(cache_length if request.same_length else None, request.clamp_distance)

    def contexts(self, protocol: Protocol, tokens: int) -> tuple[int, int]:
        if protocol.reach.window is not None:
            return protocol.reach.window, protocol.reach.window
        before = protocol.compressed + protocol.cache_length
        return before + 1, min(tokens, before + protocol.segment_length)

    def units(self, tokens: int, protocol: Protocol) -> Iterable[list[range]]:
        lanes = _cut_lanes(tokens, protocol)
        rows = protocol.batch_rows
        return (lanes[first : first + rows] for first in range(0, len(lanes), rows))

    def read(self, reader: Reader, protocol: Protocol, unit: list[range]) -> Iterator[Part]:
        """Yield the results of lanes, each of which is a row. A lane that has ended is padded."""
        memory = reader.model.empty_memory(len(unit), protocol.cache_length, protocol.reach)
        begins = [_warm_from(lane, protocol) for lane in unit]
        longest = max(lane.stop - begin for lane, begin in zip(unit, begins, strict=True))
        for done in range(0, longest, protocol.segment_length):
            segments = [_segment(begin + done, lane.stop, protocol) for lane, begin in zip(unit, begins, strict=True)]
            parts, memory = reader.read(segments, memory)
            for lane, part in zip(unit, parts, strict=True):
                if part.first in lane:
                    yield part

    def read_share(self, reader: Reader, protocol: Protocol, axis: Axis) -> Iterator[Part]:
        if protocol.lanes > 1:
            return self._read_units(reader, protocol, axis)
        return _read_chain(reader, protocol, axis)


class TokenByToken(Cached):
    """The walk of `cached` with the decoder that generates text; it gives the same losses."""

    def protocol(
        self, request: Request, config: ModelFolderConfig, length: int, *, tokens: int, where: str
    ) -> Protocol:
        found = super().protocol(request, config, length, tokens=tokens, where=where)
        if not attention_of(config.model).can_decode:
            kind = config.model.positions
            raise UserError(f"{where}: has {kind} positions, so a cached token cannot be read again; use --mode cached")
        if request.batch_rows not in (None, 1):
            given = f"--batch-rows {request.batch_rows}"
            raise UserError(f"{given}: token-by-token mode walks in one row; use --mode cached, which gives the same")
        if request.tensor > 1:
            raise UserError(f"--tensor {request.tensor}: use --mode cached, which gives the same as token-by-token")
        return found

    def _rows(self, length: int, lanes: int) -> int:
        del length, lanes
        return 1

    def read(self, reader: Reader, protocol: Protocol, unit: list[range]) -> Iterator[Part]:
        model = reader.model
        (lane,) = unit
        decoder = Decoder(
            model,
            rows=1,
            segment_length=protocol.segment_length,
            cache_length=protocol.cache_length,
            reach=protocol.reach,
        )
        if (warm := _warm_from(lane, protocol)) < lane.start:
            decoder.read(reader.inputs(warm, lane.start))
        for place in lane:
            found = decoder.step(reader.inputs(place, place + 1))
            nll = model.vocabulary.nll(found.x, reader.targets(place, place + 1), None)
            yield Part(place, nll, found.key)

    def read_share(self, reader: Reader, protocol: Protocol, axis: Axis) -> Iterator[Part]:
        return self._read_units(reader, protocol, axis)


MODES: Mapping[EvaluationMode, Mode[Any]] = {
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
    keep_keys: KeepKeys | None = None,
) -> Score:
    """Score a text. Memories are local variables: scoring between two training steps does not change the training.

    The passes are divided among the ranks of `axis`; each rank gets the complete score. `keep_keys` is called with the
    keys of this rank's passes."""
    reader = Reader(model, tokens, eos, wants_keys=keep_keys is not None)
    mode = MODES[protocol.mode]
    nll = torch.zeros(len(tokens), dtype=torch.float64, device=model.positions.table.device)
    times = torch.zeros(len(tokens), dtype=torch.int8, device=nll.device)
    for part in mode.read_share(reader, protocol, axis):
        nll[part.first : part.first + len(part.nll)] = part.nll
        times[part.first : part.first + len(part.nll)] += 1
        if keep_keys and part.keys is not None:
            keep_keys(part.first, part.keys)
        progress(len(part.nll))
    assert bool((axis.sum(times) == 1).all()), "a token was scored twice, or never"
    return Score(axis.sum(nll).cpu().numpy())


def _padded(ids: Tensor, length: int) -> Tensor:
    return F.pad(ids, (0, length - len(ids)))


def rows_at_once(length: int) -> int:
    """Return the number of segments or windows of a pass that keeps a device busy."""
    return max(1, TOKENS_AT_ONCE // length)


def _read_chain(reader: Reader, protocol: Protocol, axis: Axis) -> Iterator[Part]:
    """Walk through the text, many consecutive segments at once. All ranks make equally many passes of one shape. Until
    the memory is full, all read the first segments one by one, and the first rank's results count."""
    model = reader.model
    segments = list(_cut_windows(len(reader.tokens), protocol.segment_length, protocol.segment_length))
    memory = model.empty_memory(1, protocol.cache_length, protocol.reach)
    full = memory.length_after(protocol.cache_length, model.config, protocol.cache_length)
    opening = -(-(full - memory.length) // protocol.segment_length)
    for segment in segments[:opening]:
        parts, memory = reader.read([segment], memory)
        yield from parts if axis.rank == 0 else ()
    memory = ChainedMemory.after(memory, axis)
    rows = protocol.chained_rows
    padding = [segments[0]] * rows
    for first in range(opening, len(segments), rows * axis.size):
        own = segments[first + axis.rank * rows :][:rows]
        parts, memory = reader.read([*own, *padding][:rows], memory, protocol.segment_length)
        yield from parts[: len(own)]


def _segment(begin: int, end: int, protocol: Protocol) -> _Window:
    """Return the segment that begins there, shorter or empty at the end."""
    begin = min(begin, end)
    return _Window(begin, begin, min(begin + protocol.segment_length, end))


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
            value = "" if getattr(request, flag) is True else f" {getattr(request, flag)}"
            raise UserError(f"--{flag.replace('_', '-')}{value} needs --mode {needs}, not {request.mode}")


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
    before = -(-(protocol.compressed + protocol.cache_length) // protocol.segment_length)
    return max(0, lane.start - before * protocol.segment_length)


def share(units: Iterable[_Unit], axis: Axis) -> Iterator[_Unit]:
    """Return this rank's units."""
    return islice(units, axis.rank, None, axis.size)
