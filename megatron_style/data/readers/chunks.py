"""An input file in chunks that a worker can encode at once.

Where a file can be read from any place, a chunk is an address, else it carries its content. The size of a chunk does
not depend on the number of workers, so the order of everything derived from chunks is fixed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from megatron_style.base.errors import UserError
from megatron_style.data.readers.columns import Texts, arrow_rows, parquet_rows
from megatron_style.data.readers.compression import blocks_of
from megatron_style.data.readers.inputs import InputFile

CHUNK_BYTES = 4 << 20


@dataclass(frozen=True)
class ReadOptions:
    key: str = "text"  # of JSON records and columns
    skip_bad: bool = False
    chunk_bytes: int = CHUNK_BYTES


@dataclass(frozen=True)
class ByteRange:
    """Complete lines of a file: bytes [start, end)."""

    start: int
    end: int

    def __len__(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class Lines:
    """Complete lines of a compressed file; `start` and `first_line` are those of the content."""

    data: bytes
    start: int
    first_line: int  # from 1

    def __len__(self) -> int:
        return len(self.data)


@dataclass(frozen=True)
class Rows:
    """Rows of a column."""

    texts: tuple[bytes | None, ...]  # in UTF-8, if they are sound
    first_row: int  # from 1

    def __len__(self) -> int:
        return sum(len(text or b"") for text in self.texts)


@dataclass(frozen=True)
class Chunk:
    file: InputFile
    content: ByteRange | Lines | Rows
    closes: bool = False  # the last chunk of its file
    damage: str | None = None  # the reason why the rest of the file is left out


def chunks_of(files: Iterable[InputFile], options: ReadOptions) -> Iterator[Chunk]:
    """Yield the chunks of all files in their order. Each file has at least one chunk, and its last one closes it."""
    for file in files:
        held: Chunk | None = None
        try:
            for content in _SPLITTERS[file.format](file, options):
                if held is not None:
                    yield held
                held = Chunk(file, content)
            if held is None:
                raise UserError(f"{file.path}: is empty; expected at least one line of text")
        except UserError as error:
            if not options.skip_bad:
                raise
            if held is not None:
                yield held
            held = Chunk(file, Lines(b"", 0, 1), damage=str(error))
        yield replace(held, closes=True)


def _lines(file: InputFile, options: ReadOptions) -> Iterator[ByteRange | Lines]:
    if file.compression is None:
        return _ranges(file, options.chunk_bytes)
    return _streamed(blocks_of(file.path, file.compression), options.chunk_bytes)


def _ranges(file: InputFile, chunk_bytes: int) -> Iterator[ByteRange]:
    start = file.start
    last = start + file.size
    with file.path.open("rb") as content:
        while start < last:
            content.seek(start + chunk_bytes - 1)
            content.readline()  # to the end of the last line, however long it is
            end = min(content.tell(), last)
            yield ByteRange(start, end)
            start = end


def _streamed(blocks: Iterator[bytes], chunk_bytes: int) -> Iterator[Lines]:
    """Cut a stream after the line in which a chunk is full. Before damage, all complete lines are handed out."""
    start = 0
    line = 1
    for data in _cut(blocks, chunk_bytes):
        yield Lines(data, start, line)
        start += len(data)
        line += data.count(b"\n")


def _cut(blocks: Iterator[bytes], chunk_bytes: int) -> Iterator[bytes]:
    held: list[bytes] = []
    size = 0
    try:
        for block in blocks:
            rest = block
            while end := rest.find(b"\n", max(0, chunk_bytes - 1 - size)) + 1:
                yield b"".join([*held, rest[:end]])
                rest = rest[end:]
                held = []
                size = 0
            held.append(rest)
            size += len(rest)
    except UserError:
        data = b"".join(held)
        if complete := data[: data.rfind(b"\n") + 1]:
            yield complete
        raise
    if size:
        yield b"".join(held)


def _parquet(file: InputFile, options: ReadOptions) -> Iterator[Rows]:
    return _gathered(parquet_rows(file.path, options.key), options.chunk_bytes)


def _arrow(file: InputFile, options: ReadOptions) -> Iterator[Rows]:
    return _gathered(arrow_rows(file.path, options.key), options.chunk_bytes)


def _gathered(batches: Iterator[Texts], chunk_bytes: int) -> Iterator[Rows]:
    held: Texts = []
    size = 0
    row = 1
    for texts in batches:
        held += texts
        size += sum(len(text or b"") for text in texts)
        if size >= chunk_bytes:
            yield Rows(tuple(held), row)
            row += len(held)
            held = []
            size = 0
    if held:
        yield Rows(tuple(held), row)


_SPLITTERS: Mapping[str, Callable[[InputFile, ReadOptions], Iterator[ByteRange | Lines | Rows]]] = {
    "text": _lines,
    "jsonl": _lines,
    "parquet": _parquet,
    "arrow": _arrow,
}
