"""Compressed files as blocks of bytes. A stream that ends too early is an error in every format."""

from __future__ import annotations

import bz2
import gzip
import lzma
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_style.base.errors import UserError

BLOCK = 1 << 20
_ZSTD_BLOCK = 1 << 14  # compressed; bounds what a block can become
_ZSTD_WINDOW = 1 << 31  # of `zstd --long=31`


def blocks_of(path: Path, compression: str | None) -> Iterator[bytes]:
    """Yield the content in blocks; damage is a UserError, after all that could be read before it."""
    done = 0
    try:
        for block in _READERS[compression](path):
            done += len(block)
            yield block
    except (EOFError, OSError, zlib.error, lzma.LZMAError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # the disk's, not the data's
            raise
        raise UserError(
            f"{path}: damaged {compression} data after {done} bytes of content ({error}); fetch or compress it again"
        ) from error


def _plain(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        yield from _reads(file)


def _gzip(path: Path) -> Iterator[bytes]:
    with gzip.open(path, "rb") as file:
        yield from _reads(file)


def _bzip2(path: Path) -> Iterator[bytes]:
    with bz2.open(path, "rb") as file:
        yield from _reads(file)


def _xz(path: Path) -> Iterator[bytes]:
    with lzma.open(path, "rb") as file:
        yield from _reads(file)


def _zstd(path: Path) -> Iterator[bytes]:
    """Yield the content frame by frame: the library's own reader takes a truncated file for a complete one."""
    library = _zstandard()
    decompressor = library.ZstdDecompressor(max_window_size=_ZSTD_WINDOW)
    frame = None
    with path.open("rb") as file:
        while data := file.read(_ZSTD_BLOCK):
            while data:
                frame = frame or decompressor.decompressobj()
                try:
                    block = frame.decompress(data)
                except library.ZstdError as error:
                    raise EOFError(str(error)) from error
                yield block
                data = frame.unused_data if frame.eof else b""
                frame = None if frame.eof else frame
    if frame is not None:
        raise EOFError("the file ends within a frame")


def _reads(file: Any) -> Iterator[bytes]:
    while block := file.read1(BLOCK):  # not `read`, which loses what it has when it meets damage
        yield block


_READERS: Mapping[str | None, Callable[[Path], Iterator[bytes]]] = {
    None: _plain,
    "gzip": _gzip,
    "bzip2": _bzip2,
    "xz": _xz,
    "zstd": _zstd,
}


def _zstandard() -> Any:
    try:
        import zstandard as library
    except ImportError:
        raise UserError("zstd files need the package `zstandard`; run `pip install zstandard`") from None
    return library
