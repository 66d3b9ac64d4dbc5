"""Text files as chunks of complete lines.

The size of a chunk does not depend on the number of workers, so the order of everything derived from chunks is fixed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron_style.base.errors import UserError

CHUNK_BYTES = 4 << 20


@dataclass(frozen=True)
class TextFile:
    path: Path
    name: str  # in records, which do not name the folder

    @classmethod
    def at(cls, path: Path) -> TextFile:
        return cls(path, path.name)


@dataclass(frozen=True)
class Chunk:
    """Bytes [start, end) of a file: complete lines."""

    path: Path
    start: int
    end: int

    def __len__(self) -> int:
        return self.end - self.start


def check_text_file(path: Path) -> None:
    """Refuse what cannot be a text file, before any work is done."""
    if not path.exists():
        raise UserError(f"{path}: no such file; expected a UTF-8 text file")
    if not path.is_file():
        raise UserError(f"{path}: is not a regular file; expected a UTF-8 text file (it is read more than once)")
    if not path.stat().st_size:
        raise UserError(f"{path}: is empty; expected at least one line of text")


def file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def chunks_of(files: Iterable[TextFile], chunk_bytes: int = CHUNK_BYTES) -> Iterator[Chunk]:
    for file in files:
        yield from _file_chunks(file.path, chunk_bytes)


def read_lines(chunk: Chunk) -> list[str]:
    """Return the chunk's lines, split at newlines only: other line separators of Unicode are part of the text."""
    with chunk.path.open("rb") as file:
        file.seek(chunk.start)
        raw = file.read(len(chunk))
    _refuse_binary(raw, chunk)
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        where = chunk.start + error.start
        raise UserError(f"{chunk.path}: byte {where} is not UTF-8 ({error.reason}); expected UTF-8 text") from error
    return [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")]


def _file_chunks(path: Path, chunk_bytes: int) -> Iterator[Chunk]:
    size = path.stat().st_size
    start = 0
    with path.open("rb") as file:
        while start < size:
            file.seek(start + chunk_bytes - 1)
            file.readline()  # to the end of the last line, however long it is
            end = min(file.tell(), size)
            yield Chunk(path, start, end)
            start = end


def _refuse_binary(raw: bytes, chunk: Chunk) -> None:
    nul = raw.find(b"\0")
    if nul >= 0:
        raise UserError(f"{chunk.path}: byte {chunk.start + nul} is NUL, so this is a binary file; expected UTF-8 text")
