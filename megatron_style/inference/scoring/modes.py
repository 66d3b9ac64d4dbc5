"""The modes of evaluation: each cuts a text into units, and gives every prediction its context.

The protocol alone cuts the work into passes of fixed shapes, and one rank computes each pass: the result does not
depend on the number of ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, Generic, TypeVar

from megatron_style.base.errors import UserError
from megatron_style.config.model import EvaluationMode, ModelConfig, ModelFolderConfig
from megatron_style.inference.decoder import Decoder
from megatron_style.inference.scoring.protocol import Protocol, Request, rows_at_once
from megatron_style.inference.scoring.reader import Part, Reader, Window
from megatron_style.inference.scoring.walk import batches, cut_lanes, read_chain, segment_at, share, warm_from
from megatron_style.model.attention import attention_of
from megatron_style.model.memory import Reach
from megatron_style.parallel.topology import Axis

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

    @abstractmethod
    def read_share(self, reader: Reader, protocol: Protocol, axis: Axis) -> Iterator[Part]:
        """Yield this rank's share of the results. All ranks have to call it together."""

    def _read_units(self, reader: Reader, protocol: Protocol, axis: Axis) -> Iterator[Part]:
        for unit in share(self.units(len(reader.tokens), protocol), axis):
            yield from self.read(reader, protocol, unit)


class Nonoverlapping(Mode[list[Window]]):
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

    def units(self, tokens: int, protocol: Protocol) -> Iterable[list[Window]]:
        return batches(tokens, protocol)

    def read(self, reader: Reader, protocol: Protocol, unit: list[Window]) -> Iterator[Part]:
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
        lanes = cut_lanes(tokens, protocol)
        rows = protocol.batch_rows
        return (lanes[first : first + rows] for first in range(0, len(lanes), rows))

    def read(self, reader: Reader, protocol: Protocol, unit: list[range]) -> Iterator[Part]:
        """Yield the results of lanes, each of which is a row. A lane that has ended is padded."""
        memory = reader.model.empty_memory(len(unit), protocol.cache_length, protocol.reach)
        begins = [warm_from(lane, protocol) for lane in unit]
        longest = max(lane.stop - begin for lane, begin in zip(unit, begins, strict=True))
        for done in range(0, longest, protocol.segment_length):
            segments = [segment_at(begin + done, lane.stop, protocol) for lane, begin in zip(unit, begins, strict=True)]
            parts, memory = reader.read(segments, memory)
            for lane, part in zip(unit, parts, strict=True):
                if part.first in lane:
                    yield part

    def read_share(self, reader: Reader, protocol: Protocol, axis: Axis) -> Iterator[Part]:
        if protocol.lanes > 1:
            return self._read_units(reader, protocol, axis)
        return read_chain(reader, protocol, axis)


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
        if (warm := warm_from(lane, protocol)) < lane.start:
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


def make_protocol(request: Request, config: ModelFolderConfig, *, tokens: int, where: str) -> Protocol:
    """Return the protocol for a text of `tokens` tokens, or refuse a flag that the mode would ignore. `where` names the
    model in messages."""
    length = request.segment_length or config.segment_length
    config.model.check_segment(length, "--segment-length")
    if problem := config.model.foresight:
        raise UserError(f"{where}: {problem}")
    config.model.check_split(request.tensor, "--tensor")
    return MODES[request.mode].protocol(request, config, length, tokens=tokens, where=where)


def own_mode(model: ModelConfig) -> EvaluationMode:
    """Return the mode that reads a text as the model was trained to."""
    return "cached" if model.cache else "nonoverlapping"


def contexts(protocol: Protocol, tokens: int) -> tuple[int, int]:
    """Return the fewest and the most tokens that a prediction sees, after the first segment of a longer text."""
    if tokens <= protocol.segment_length:
        return 1, tokens
    return MODES[protocol.mode].contexts(protocol, tokens)


def _refuse(request: Request, *flags: str, needs: str) -> None:
    for flag in flags:
        if getattr(request, flag) is not None:
            value = "" if getattr(request, flag) is True else f" {getattr(request, flag)}"
            raise UserError(f"--{flag.replace('_', '-')}{value} needs --mode {needs}, not {request.mode}")
