"""The index of a token store: `PREFIX.idx` holds the length of every line.

The layout is `MMIDIDX`, which has dialects with the same magic and version. fairseq's, which we write by default:

    magic 9 bytes | version u64 = 1 | dtype code u8 | lines u64 | sizes int32 x lines | byte offsets int64 x lines

Megatron-LM, GPT-NeoX and DeepSpeed put a document count (u64) after `lines` and a document index (int64 each) at the
end, and number their dtypes differently. Nothing in the file names the dialect, so the sizes of both files decide.
An index is opened without reading its lines; `check` reads them all.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_style.base.errors import UserError

MAGIC = b"MMIDIDX\0\0"
VERSION = 1
HEADER = struct.Struct("<9sQBQ")  # magic, version, dtype code, lines
DOCUMENT_COUNT = struct.Struct("<Q")
SIZE = np.dtype("<i4")
OFFSET = np.dtype("<i8")
BLOCK = 1 << 20  # entries read at once

_COMMON_CODES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8"}
DTYPE_CODES = {
    "fairseq": _COMMON_CODES | {6: "<f4", 7: "<f8", 8: "<u2"},
    "Megatron-LM": _COMMON_CODES | {6: "<f8", 7: "<f4", 8: "<u2"},
    "DeepSpeed": _COMMON_CODES | {6: "<u2", 7: "<u4", 8: "<u8"},
}
LEGACY_MAGIC = b"TNTIDX\0\0"  # the older layout of the same libraries, which cannot be memory-mapped


@dataclass(frozen=True)
class Entries:
    """A contiguous array of integers in a file."""

    path: Path
    dtype: np.dtype[Any]
    start: int  # in bytes
    count: int

    @property
    def end(self) -> int:
        return self.start + self.count * self.dtype.itemsize

    def mapped(self) -> NDArray[Any]:
        if not self.count:  # an empty range cannot be mapped
            return np.empty(0, self.dtype)
        return np.memmap(self.path, self.dtype, mode="r", offset=self.start, shape=(self.count,))

    def blocks(self) -> Iterator[NDArray[Any]]:
        """Yield the entries, read in blocks: what has been read leaves the memory again."""
        with self.path.open("rb") as file:
            file.seek(self.start)
            for first in range(0, self.count, BLOCK):
                yield np.fromfile(file, self.dtype, min(BLOCK, self.count - first))


@dataclass(frozen=True)
class Index:
    """An index file of known layout."""

    path: Path
    code: int  # what it means depends on the dialect
    sizes: Entries
    offsets: Entries
    documents: Entries | None  # the first line of each document; None in fairseq's dialect

    @classmethod
    def read(cls, path: Path) -> Index:
        file_size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(HEADER.size + DOCUMENT_COUNT.size)
        code, lines = _checked_header(path, head)
        # With the same number of lines the two layouts never have the same length, so the length decides.
        plain = _layout(path, lines, start=HEADER.size)
        if file_size == plain[1].end:
            return cls(path, code, *plain, documents=None)
        sizes, offsets = _layout(path, lines, start=HEADER.size + DOCUMENT_COUNT.size)
        if len(head) == HEADER.size + DOCUMENT_COUNT.size:
            (document_count,) = DOCUMENT_COUNT.unpack_from(head, HEADER.size)
            documents = Entries(path, OFFSET, offsets.end, document_count)
            if file_size == documents.end:
                return cls(path, code, sizes, offsets, documents)
        raise UserError(
            f"{path}: has {file_size} bytes; {lines} lines need {plain[1].end} (fairseq) or at least {offsets.end} "
            "(Megatron-LM, DeepSpeed), so the file is truncated or of another kind"
        )

    def dtype_of(self, bin_path: Path) -> np.dtype[Any]:
        """Return the one integer type among the meanings of the code with which the last line ends where the .bin
        does."""
        meanings = {np.dtype(codes[self.code]) for codes in DTYPE_CODES.values()}
        bin_size = bin_path.stat().st_size
        offset, size = self._last_line()
        complete = {dtype for dtype in meanings if offset + size * dtype.itemsize == bin_size}
        if not complete:
            raise self._misfit(bin_path, bin_size, meanings)
        integers = sorted((dtype for dtype in complete if dtype.kind in "iu"), key=str)
        if not integers:
            found = " or ".join(sorted(dtype.name for dtype in complete))
            raise UserError(f"{bin_path}: holds {found} numbers (dtype code {self.code}); expected integer token ids")
        if len(integers) > 1:
            found = " or ".join(dtype.name for dtype in integers)
            raise UserError(
                f"{self.path}: ambiguous: dtype code {self.code} may mean {found}, and nothing in the files says which"
            )
        return integers[0]

    def check(self, dtype: np.dtype[Any]) -> None:
        """Read the entire index, and refuse one whose lines or documents do not follow one another."""
        self._check_sizes()
        if not self._contiguous(dtype.itemsize):
            raise self._gap()
        if self.documents is not None:
            _check_documents(self.documents, self.sizes.count)

    def _last_line(self) -> tuple[int, int]:
        """Return the offset and size of the last line that is not empty: an empty one ends anywhere."""
        sizes = self.sizes.mapped()
        for end in range(len(sizes), 0, -BLOCK):
            first = max(0, end - BLOCK)
            nonempty = np.flatnonzero(sizes[first:end])
            if len(nonempty):
                line = first + int(nonempty[-1])
                return int(self.offsets.mapped()[line]), int(sizes[line])
        return 0, 0

    def _misfit(self, bin_path: Path, bin_size: int, meanings: set[np.dtype[Any]]) -> UserError:
        """Return the reason why no meaning of the code fits the .bin."""
        tokens = self._check_sizes()
        fitting = {dtype for dtype in meanings if self._contiguous(dtype.itemsize)}
        if not fitting:
            return self._gap()
        wanted = " or ".join(map(str, sorted({tokens * dtype.itemsize for dtype in fitting})))
        kind = "truncated" if bin_size < tokens * min(dtype.itemsize for dtype in fitting) else "not of this index"
        return UserError(f"{bin_path}: has {bin_size} bytes, its index says {wanted}: {kind}")

    def _gap(self) -> UserError:
        return UserError(f"{self.path}: its lines do not follow one another; the file is damaged or of another kind")

    def _check_sizes(self) -> int:
        """Return the sum of the sizes, none of which may be negative."""
        total = 0
        for block in self.sizes.blocks():
            if int(block.min()) < 0:
                raise UserError(f"{self.path}: holds a negative line size; the file is damaged or of another kind")
            total += int(block.sum(dtype=np.int64))
        return total

    def _contiguous(self, itemsize: int) -> bool:
        """True if every line starts where the previous one ends."""
        expected = 0
        for sizes, offsets in zip(self.sizes.blocks(), self.offsets.blocks(), strict=True):
            ends = expected + np.cumsum(sizes, dtype=np.int64) * itemsize
            if offsets[0] != expected or not np.array_equal(offsets[1:], ends[:-1]):
                return False
            expected = int(ends[-1])
        return True


def _checked_header(path: Path, head: bytes) -> tuple[int, int]:
    if head.startswith(LEGACY_MAGIC):
        raise UserError(f"{path}: is an index of the older TNTIDX kind; prepare the data again with the `mmap` kind")
    if not head.startswith(MAGIC):
        raise UserError(f"{path}: is not a token index: it starts with {head[:9]!r} instead of {MAGIC!r}")
    if len(head) < HEADER.size:
        raise UserError(f"{path}: has {len(head)} bytes, too few for the header of a token index ({HEADER.size})")
    _, version, code, lines = HEADER.unpack_from(head)
    if version != VERSION:
        raise UserError(f"{path}: has version {version}; expected {VERSION}")
    if not any(code in codes for codes in DTYPE_CODES.values()):
        raise UserError(f"{path}: has dtype code {code}; the known codes are 1 to 8")
    return code, lines


def _layout(path: Path, lines: int, *, start: int) -> tuple[Entries, Entries]:
    sizes = Entries(path, SIZE, start, lines)
    return sizes, Entries(path, OFFSET, sizes.end, lines)


def _check_documents(documents: Entries, lines: int) -> None:
    last = 0
    for block in documents.blocks():
        if int(block[0]) < last or bool((np.diff(block) < 0).any()) or int(block[-1]) > lines:
            raise UserError(
                f"{documents.path}: its document index does not run from 0 to {lines}; "
                "the file is damaged or of another kind"
            )
        last = int(block[-1])
