"""The modes of evaluation: each cuts a text into units, and gives every prediction its context.

The protocol alone cuts the work into units (batches of windows, lanes), and one rank computes each unit: the result
does not depend on the number of ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby, pairwise
from typing import Any, Generic, TypeVar

from megatron_style.base.errors import UserError
from megatron_style.config.model import EvaluationMode, ModelFolderConfig
from megatron_style.inference.decoder import Decoder
from megatron_style.inference.scoring.protocol import Protocol, Request
from megatron_style.inference.scoring.reader import Part, Reader, Window
from megatron_style.model.attention import attention_of
from megatron_style.model.memory import Reach

_TOKENS_AT_ONCE = 4096  # in windows, unless --batch-rows is given
_Unit = TypeVar("_Unit")


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


class Nonoverlapping(Mode[list[Window]]):
    """Independent segments, many at once."""

    def protocol(
        self, request: Request, config: ModelFolderConfig, length: int, *, tokens: int, where: str
    ) -> Protocol:
        del config, tokens, where
        walk_only = ("cache_length", "lanes", "same_length", "clamp_distance")
        _refuse(request, *walk_only, needs="cached or token-by-token")
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

    def units(self, tokens: int, protocol: Protocol) -> Iterable[list[Window]]:
        return _batches(tokens, protocol)

    def read(self, reader: Reader, protocol: Protocol, unit: list[Window]) -> Iterator[Part]:
        del protocol
        parts, _ = reader.read(unit, reader.model.empty_memory(len(unit), 0))
        yield from parts


class Sliding(Nonoverlapping):
    """Windows that overlap, of which only the last `stride` tokens count."""

    def _stride(self, request: Request, length: int) -> int | None:
        if request.stride is None:
            raise UserError("--mode sliding needs --stride S: how many tokens of each window count")
        if request.stride > length:
            raise UserError(f"--stride {request.stride} must not be above the segment length of {length}")
        return request.stride


class Cached(Mode[range]):
    """One walk through the text, in which each segment attends to the previous one. A walk can be cut into lanes, each
    warmed by the text before it."""

    def protocol(
        self, request: Request, config: ModelFolderConfig, length: int, *, tokens: int, where: str
    ) -> Protocol:
        _refuse(request, "stride", needs="sliding")
        if not config.model.cache and not attention_of(config.model).can_decode:
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
        reach = self._reach(request, config, cache_length, where)
        memory = config.model.memory
        compressed = 0 if memory is None else memory.compressed * memory.rate
        return Protocol(
            request.mode, length, cache_length=cache_length, compressed=compressed, lanes=lanes, reach=reach
        )

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

    def units(self, tokens: int, protocol: Protocol) -> Iterable[range]:
        return _cut_lanes(tokens, protocol)

    def read(self, reader: Reader, protocol: Protocol, unit: range) -> Iterator[Part]:
        memory = reader.model.empty_memory(1, protocol.cache_length, protocol.reach)
        for begin in range(_warm_from(unit, protocol), unit.stop, protocol.segment_length):
            segment = Window(begin, begin, min(begin + protocol.segment_length, unit.stop))
            parts, memory = reader.read([segment], memory)
            if begin in unit:
                yield from parts


class TokenByToken(Cached):
    """The walk of `cached` with the decoder that generates text; it gives the same losses."""

    def protocol(
        self, request: Request, config: ModelFolderConfig, length: int, *, tokens: int, where: str
    ) -> Protocol:
        found = super().protocol(request, config, length, tokens=tokens, where=where)
        if not attention_of(config.model).can_decode:
            kind = config.model.positions
            raise UserError(f"{where}: has {kind} positions, so a cached token cannot be read again; use --mode cached")
        if request.tensor > 1:
            raise UserError(f"--tensor {request.tensor}: use --mode cached, which gives the same as token-by-token")
        return found

    def read(self, reader: Reader, protocol: Protocol, unit: range) -> Iterator[Part]:
        model = reader.model
        decoder = Decoder(
            model,
            rows=1,
            segment_length=protocol.segment_length,
            cache_length=protocol.cache_length,
            reach=protocol.reach,
        )
        if (warm := _warm_from(unit, protocol)) < unit.start:
            decoder.read(reader.inputs(warm, unit.start))
        for place in unit:
            found = decoder.step(reader.inputs(place, place + 1))
            nll = model.vocabulary.nll(found.x, reader.targets(place, place + 1), None)
            yield Part(place, nll, found.key)


MODES: Mapping[EvaluationMode, Mode[Any]] = {
    "nonoverlapping": Nonoverlapping(),
    "sliding": Sliding(),
    "cached": Cached(),
    "token-by-token": TokenByToken(),
}


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


def contexts(protocol: Protocol, tokens: int) -> tuple[int, int]:
    """Return the fewest and the most tokens that a prediction sees, after the first segment of a longer text."""
    if tokens <= protocol.segment_length:
        return 1, tokens
    return MODES[protocol.mode].contexts(protocol, tokens)


def _batches(total: int, protocol: Protocol) -> Iterator[list[Window]]:
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


def _cut_windows(total: int, L: int, stride: int) -> Iterator[Window]:
    """Yield windows: the first counts in full, the others only by their last `stride` tokens; the last may be short."""
    yield Window(0, 0, min(L, total))
    for counted in range(L, total, stride):
        yield Window(counted - (L - stride), counted, min(counted + stride, total))


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
