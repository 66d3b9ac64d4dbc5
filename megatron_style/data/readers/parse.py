"""From a chunk to the texts in it. A line, record or row that is no text is named with its place, or left out."""

from __future__ import annotations

from codecs import BOM_UTF8
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from megatron_style.base.errors import UserError
from megatron_style.base.json_text import parse_json
from megatron_style.data.readers.chunks import ByteRange, Chunk, Lines, ReadOptions, Rows
from megatron_style.data.text import decode_text


@dataclass
class Texts:
    """The texts of a chunk, and how many parts of it were left out."""

    are_documents: bool  # each of them; else all texts of a file are one
    texts: list[str] = field(default_factory=list)
    left_out: int = 0
    first_left_out: str | None = None

    def leave_out(self, place: Callable[[], str], reason: object, options: ReadOptions) -> None:
        """Count a part that is no text; unless damage is to be skipped, refuse it."""
        if self.first_left_out is None or not options.skip_bad:  # a place may take long to find
            self.first_left_out = f"{place()}: {reason}"
        if not options.skip_bad:
            raise UserError(f"{self.first_left_out}; repair it, or leave out what is damaged with --skip-bad")
        self.left_out += 1


class _NoText(Exception):
    """The reason why something is not a text."""


def read_texts(chunk: Chunk, options: ReadOptions) -> Texts:
    """Read a chunk. The first damaged part is a UserError, unless damage is to be skipped."""
    found = Texts(are_documents=chunk.file.format != "text")
    if chunk.damage is not None:
        found.first_left_out = chunk.damage
        found.left_out += 1
    _PARSERS[chunk.file.format](chunk, options, found)
    return found


def _add_lines(chunk: Chunk, options: ReadOptions, found: Texts) -> None:
    raw, start = _raw(chunk)
    if not raw:
        return
    try:
        found.texts.append(decode_text(raw, chunk.file.path, start))
    except UserError as error:
        if not options.skip_bad:
            raise
        lines = raw.removesuffix(b"\n").split(b"\n")
        good = [line.decode("utf-8") for line in lines if _is_text(line)]
        if good:
            found.texts.append("\n".join(good) + "\n")
        found.first_left_out = found.first_left_out or str(error)
        found.left_out += len(lines) - len(good)


def _is_text(line: bytes) -> bool:
    try:
        return "\0" not in line.decode("utf-8")
    except UnicodeDecodeError:
        return False


def _add_records(chunk: Chunk, options: ReadOptions, found: Texts) -> None:
    raw, _ = _raw(chunk)
    for index, line in enumerate(raw.split(b"\n")):
        if not line.strip():
            continue
        try:
            found.texts.append(_text_of_record(line, options.key))
        except _NoText as reason:
            found.leave_out(partial(_line_place, chunk, index), reason, options)


def _text_of_record(line: bytes, key: str) -> str:
    try:
        record = parse_json(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise _NoText(f"byte {error.start} of the line is not UTF-8") from None
    except ValueError as error:
        raise _NoText(f"is not a JSON record ({error}); each line must be one") from None
    if not isinstance(record, dict):
        raise _NoText(f"is not a JSON object but a {type(record).__name__}; each line must be one object")
    if key not in record:
        raise _NoText(f"has no key `{key}`, but {', '.join(record) or 'none'} (--key names the one of the text)")
    return _checked(record[key], key)


def _add_rows(chunk: Chunk, options: ReadOptions, found: Texts) -> None:
    if not isinstance(chunk.content, Rows):
        return
    for index, text in enumerate(chunk.content.texts):
        try:
            found.texts.append(_checked(_decoded(text), options.key))
        except _NoText as reason:
            place = f"{chunk.file.path}: row {chunk.content.first_row + index}"
            found.leave_out(place.__str__, reason, options)


def _decoded(text: bytes | None) -> str | None:
    try:
        return None if text is None else text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _NoText(f"byte {error.start} of the text is not UTF-8") from None


def _checked(text: Any, key: str) -> str:
    """Return the value if it is a text that can be encoded."""
    if not isinstance(text, str):
        raise _NoText(f"`{key}` is {'null' if text is None else type(text).__name__}; expected a string")
    if "\0" in text:
        raise _NoText(f"`{key}` holds a NUL character, so it is binary data")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise _NoText(f"`{key}` holds half a surrogate pair at character {error.start}") from None
    return text


_PARSERS: Mapping[str, Callable[[Chunk, ReadOptions, Texts], None]] = {
    "text": _add_lines,
    "jsonl": _add_records,
    "parquet": _add_rows,
    "arrow": _add_rows,
}


def _raw(chunk: Chunk) -> tuple[bytes, int]:
    """Return the bytes of a chunk of lines, and where in the content they begin. A byte order mark is no text."""
    assert not isinstance(chunk.content, Rows), "rows have no bytes"
    start = chunk.content.start
    data = _bytes_of(chunk.file.path, chunk.content)
    if start == 0 and data.startswith(BOM_UTF8):
        return data[len(BOM_UTF8) :], len(BOM_UTF8)
    return data, start


def _bytes_of(path: Path, content: ByteRange | Lines) -> bytes:
    if isinstance(content, Lines):
        return content.data
    with path.open("rb") as file:
        file.seek(content.start)
        return file.read(len(content))


def _line_place(chunk: Chunk, index: int) -> str:
    return f"{chunk.file.path}:{_first_line(chunk) + index}"


def _first_line(chunk: Chunk) -> int:
    """Return the number of the chunk's first line. For an address it is counted now: it is in a message only."""
    if isinstance(chunk.content, Lines):
        return chunk.content.first_line
    assert isinstance(chunk.content, ByteRange), "rows have no lines"
    line = 1
    with chunk.file.path.open("rb") as file:
        while file.tell() < chunk.content.start:
            line += file.read(min(1 << 20, chunk.content.start - file.tell())).count(b"\n")
    return line
