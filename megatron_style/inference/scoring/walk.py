"""How a text is cut into windows, segments and lanes, and the walk that reads many segments of it at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby, islice, pairwise
from typing import TypeVar

from megatron_style.config.model import ModelConfig
from megatron_style.inference.scoring.chain import ChainedMemory
from megatron_style.inference.scoring.protocol import Protocol
from megatron_style.inference.scoring.reader import Part, Reader, Window
from megatron_style.parallel.topology import Axis

_Unit = TypeVar("_Unit")


def read_chain(reader: Reader, protocol: Protocol, axis: Axis) -> Iterator[Part]:
    """Walk through the text, many consecutive segments at once. All ranks make equally many passes; one that has no
    segment left repeats the first ones, without a result. Until the memory is full, all ranks read the first segments
    one by one, and the first rank's results count."""
    model = reader.model
    segments = list(cut_windows(len(reader.tokens), protocol.segment_length, protocol.segment_length))
    memory = model.empty_memory(1, protocol.cache_length, protocol.reach)
    full = memory.length_after(protocol.cache_length, model.config, protocol.cache_length)
    opening = -(-(full - memory.length) // protocol.segment_length)
    for segment in segments[:opening]:
        parts, memory = reader.read([segment], memory)
        yield from parts if axis.rank == 0 else ()
    memory = ChainedMemory.after(memory, axis)
    least = -(-_tokens_of_memory(model.config, protocol) // protocol.segment_length)
    rows = max(protocol.batch_rows, least)
    for first in range(opening, len(segments), rows * axis.size):
        own = segments[first + axis.rank * rows :][:rows]
        padding = [segments[0]] * (least - len(own))
        parts, memory = reader.read([*own, *padding], memory, protocol.segment_length)
        yield from parts[: len(own)]


def _tokens_of_memory(config: ModelConfig, protocol: Protocol) -> int:
    """Return the tokens of which the longer part of a memory is made: the rows of a rank must have as many."""
    compressed = 0 if config.memory is None else config.memory.compressed * config.memory.rate
    return max(protocol.cache_length, compressed)


def segment_at(begin: int, end: int, protocol: Protocol) -> Window:
    """Return the segment that begins there, shorter or empty at the end."""
    begin = min(begin, end)
    return Window(begin, begin, min(begin + protocol.segment_length, end))


def batches(total: int, protocol: Protocol) -> Iterator[list[Window]]:
    """Yield batches of windows of one shape."""
    windows = cut_windows(total, protocol.segment_length, protocol.stride or protocol.segment_length)
    for _, alike in groupby(windows, key=lambda window: window.shape):
        same = list(alike)
        for first in range(0, len(same), protocol.batch_rows):
            yield same[first : first + protocol.batch_rows]


def cut_windows(total: int, L: int, stride: int) -> Iterator[Window]:
    """Yield windows: the first counts in full, the others only by their last `stride` tokens; the last may be short."""
    yield Window(0, 0, min(L, total))
    for counted in range(L, total, stride):
        yield Window(counted - (L - stride), counted, min(counted + stride, total))


def cut_lanes(total: int, protocol: Protocol) -> list[range]:
    """Return contiguous lanes of full segments, as equal as possible."""
    L = protocol.segment_length
    segments = -(-total // L)
    edges = [segments * lane // protocol.lanes * L for lane in range(protocol.lanes)] + [total]
    return [range(*edge) for edge in pairwise(edges)]


def warm_from(lane: range, protocol: Protocol) -> int:
    """Return the token at which a lane must start to read, so that its memory is full at its first token."""
    before = -(-(protocol.compressed + protocol.cache_length) // protocol.segment_length)
    return max(0, lane.start - before * protocol.segment_length)


def share(units: Iterable[_Unit], axis: Axis) -> Iterator[_Unit]:
    """Return this rank's units."""
    return islice(units, axis.rank, None, axis.size)
