"""Text as bytes of a file: what may be text, its lines, its digest."""

from __future__ import annotations

import hashlib
from pathlib import Path

from megatron_style.base.errors import UserError


def check_text_file(path: Path) -> None:
    """Refuse what cannot be a text file, before any work is done."""
    if not path.exists():
        raise UserError(f"{path}: no such file; expected a UTF-8 text file")
    if not path.is_file():
        raise UserError(f"{path}: is not a regular file; expected a UTF-8 text file (it is read more than once)")
    if not path.stat().st_size:
        raise UserError(f"{path}: is empty; expected at least one line of text")


def read_lines(path: Path) -> list[str]:
    return lines_of(decode_text(path.read_bytes(), path))


def decode_text(raw: bytes, path: Path, start: int = 0) -> str:
    """Return the text of bytes that begin at `start` of a file; binary data are refused."""
    nul = raw.find(b"\0")
    if nul >= 0:
        raise UserError(f"{path}: byte {start + nul} is NUL, so this is a binary file; expected UTF-8 text")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        where = start + error.start
        remedy = "convert it, as with iconv -f latin1 -t utf-8"
        raise UserError(f"{path}: byte {where} is not UTF-8 ({error.reason}); {remedy}") from error


def lines_of(text: str) -> list[str]:
    """Return the lines, split at newlines only: other line separators of Unicode are part of the text."""
    return [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")]


def file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
