"""The token store: `PREFIX.bin` holds the token ids in sequence, `PREFIX.idx` the length of every line.

The layout is `MMIDIDX`, which has dialects with the same magic and version. fairseq's, which we write:

    magic 9 bytes | version u64 = 1 | dtype code u8 | lines u64 | sizes int32 x lines | byte offsets int64 x lines

Megatron-LM, GPT-NeoX and DeepSpeed put a document count (u64) after `lines` and a document index (int64 each) at the
end, and number their dtypes differently. Nothing in the file names the dialect, so the sizes of both files decide.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
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


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return the dtype that fairseq chooses, so that the same text gives the same bytes."""
    return np.dtype("<u2") if vocab_size < 65500 else np.dtype("<i4")


def store_files(prefix: Path) -> tuple[Path, Path]:
    """Return the .bin and .idx of a prefix, which may be given as one of the two files."""
    if prefix.suffix in (".bin", ".idx"):
        prefix = prefix.with_suffix("")
    return prefix.with_name(prefix.name + ".bin"), prefix.with_name(prefix.name + ".idx")


class TokenStoreWriter:
    """Writes a store as a stream: neither tokens nor sizes are kept in memory."""

    def __init__(self, prefix: Path, vocab_size: int) -> None:
        self.dtype = token_dtype(vocab_size)
        self.tokens = 0
        self.lines = 0
        self._vocab_size = vocab_size
        self._sha256 = hashlib.sha256()
        bin_path, idx_path = store_files(prefix)
        self._bin = bin_path.open("wb")
        self._idx = idx_path.open("w+b")
        self._write_header()  # again at the end, with the number of lines

    def append(self, ids: NDArray[Any], line_sizes: NDArray[Any]) -> None:
        """Add complete lines: their ids in sequence, and the number of ids of each line."""
        assert int(line_sizes.sum()) == len(ids), "sizes and ids disagree"
        assert not len(ids) or (ids.min() >= 0 and ids.max() < self._vocab_size), "an id outside the vocabulary"
        data = ids.astype(self.dtype, copy=False).tobytes()
        self._bin.write(data)
        self._sha256.update(data)
        self._idx.write(line_sizes.astype(SIZE, copy=False).tobytes())
        self.tokens += len(ids)
        self.lines += len(line_sizes)

    def close(self) -> None:
        """Complete the index, and return only when both files are on disk."""
        self._write_offsets()
        self._idx.seek(0)
        self._write_header()
        for file in (self._bin, self._idx):
            file.flush()
            os.fsync(file.fileno())
            file.close()

    @property
    def sha256(self) -> str:
        """Return the digest of the .bin so far."""
        return self._sha256.hexdigest()

    def __enter__(self) -> TokenStoreWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
            return
        for file in (self._bin, self._idx):
            with suppress(OSError):  # closing flushes, which fails again on a full disk and would hide the first error
                file.close()

    def _write_header(self) -> None:
        code = next(code for code, name in DTYPE_CODES["fairseq"].items() if np.dtype(name) == self.dtype)
        self._idx.write(HEADER.pack(MAGIC, VERSION, code, self.lines))

    def _write_offsets(self) -> None:
        """Read the sizes back in blocks, and write the offset of each line after them."""
        offset = 0
        for first in range(0, self.lines, BLOCK):
            self._idx.seek(HEADER.size + first * SIZE.itemsize)
            lines = min(BLOCK, self.lines - first)
            sizes = np.frombuffer(self._idx.read(lines * SIZE.itemsize), SIZE).astype(np.int64)
            ends = offset + np.cumsum(sizes) * self.dtype.itemsize
            starts = np.concatenate(([offset], ends[:-1]))
            self._idx.seek(HEADER.size + self.lines * SIZE.itemsize + first * OFFSET.itemsize)
            self._idx.write(starts.astype(OFFSET).tobytes())
            offset = int(ends[-1])


@dataclass(frozen=True)
class TokenStore:
    """An open store; its tokens are mapped when first used."""

    path: Path  # the .bin
    dtype: np.dtype[Any]
    size: int
    _sizes: _Entries

    def __len__(self) -> int:
        return self.size

    @cached_property
    def tokens(self) -> NDArray[Any]:
        """Return all ids as one flat, read-only stream."""
        return np.memmap(self.path, self.dtype, mode="r", shape=(self.size,))

    @property
    def line_sizes(self) -> NDArray[Any]:
        """Return the number of ids of each line."""
        return self._sizes.mapped()

    def check_ids(self, vocab_size: int) -> None:
        """Refuse ids outside the vocabulary: they would read beyond the embedding's end."""
        for first in range(0, self.size, BLOCK):
            block = self.tokens[first : first + BLOCK]
            if int(block.min()) >= 0 and int(block.max()) < vocab_size:
                continue
            at = int(np.argmax((block < 0) | (block >= vocab_size)))
            raise UserError(
                f"{self.path}: token {first + at} is id {int(block[at])}, outside the vocabulary of {vocab_size}; "
                "the store and the dictionary must belong together"
            )


def open_store(prefix: Path | str, vocab_size: int | None = None) -> TokenStore:
    """Open PREFIX.bin and PREFIX.idx in any of the dialects; with `vocab_size`, check every id against it."""
    bin_path, idx_path = store_files(Path(prefix))
    for path in (bin_path, idx_path):
        if not path.is_file():
            raise UserError(f"{path}: no such file; a token store is {bin_path.name} and {idx_path.name}")
    index = _Index.read(idx_path)
    store = TokenStore(bin_path, _resolve_dtype(index, bin_path), index.tokens, index.sizes)
    if not len(store):
        raise UserError(f"{bin_path}: holds no tokens; expected at least one")
    if vocab_size is not None:
        store.check_ids(vocab_size)
    return store


@dataclass(frozen=True)
class _Entries:
    """A contiguous array of integers in the index file."""

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


@dataclass(frozen=True)
class _Index:
    """An index file of known layout; the meaning of its dtype code is not known yet."""

    path: Path
    code: int
    sizes: _Entries
    offsets: _Entries
    tokens: int

    @classmethod
    def read(cls, path: Path) -> _Index:
        file_size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(HEADER.size + DOCUMENT_COUNT.size)
        code, lines = _checked_header(path, head)
        # With the same number of lines the two layouts never have the same length, so the length decides.
        plain = _layout(path, lines, start=HEADER.size)
        if file_size == plain[1].end:
            return cls(path, code, *plain, _checked_total(path, plain[0]))
        sizes, offsets = _layout(path, lines, start=HEADER.size + DOCUMENT_COUNT.size)
        if len(head) == HEADER.size + DOCUMENT_COUNT.size:
            (document_count,) = DOCUMENT_COUNT.unpack_from(head, HEADER.size)
            documents = _Entries(path, OFFSET, offsets.end, document_count)
            if file_size == documents.end:
                _check_documents(documents, lines)
                return cls(path, code, sizes, offsets, _checked_total(path, sizes))
        raise UserError(
            f"{path}: has {file_size} bytes; {lines} lines need {plain[1].end} (fairseq) or at least {offsets.end} "
            "(Megatron-LM, DeepSpeed), so the file is truncated or of another kind"
        )

    def contiguous(self, itemsize: int) -> bool:
        """True if every line starts where the previous one ends."""
        expected = 0
        for sizes, offsets in zip(_blocks(self.sizes), _blocks(self.offsets), strict=True):
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


def _layout(path: Path, lines: int, *, start: int) -> tuple[_Entries, _Entries]:
    sizes = _Entries(path, SIZE, start, lines)
    return sizes, _Entries(path, OFFSET, sizes.end, lines)


def _checked_total(path: Path, sizes: _Entries) -> int:
    total = 0
    for block in _blocks(sizes):
        if int(block.min()) < 0:
            raise UserError(f"{path}: holds a negative line size; the file is damaged or of another kind")
        total += int(block.sum(dtype=np.int64))
    return total


def _check_documents(documents: _Entries, lines: int) -> None:
    last = 0
    for block in _blocks(documents):
        if int(block[0]) < last or bool((np.diff(block) < 0).any()) or int(block[-1]) > lines:
            raise UserError(
                f"{documents.path}: its document index does not run from 0 to {lines}; "
                "the file is damaged or of another kind"
            )
        last = int(block[-1])


def _blocks(entries: _Entries) -> Iterator[NDArray[Any]]:
    mapped = entries.mapped()
    for first in range(0, entries.count, BLOCK):
        yield mapped[first : first + BLOCK]


def _resolve_dtype(index: _Index, bin_path: Path) -> np.dtype[Any]:
    """Return the one integer type among the meanings of the code that fits the offsets and the size of the .bin."""
    meanings = {np.dtype(codes[index.code]) for codes in DTYPE_CODES.values()}
    fitting = {dtype for dtype in meanings if index.contiguous(dtype.itemsize)}
    if not fitting:
        raise UserError(f"{index.path}: its lines do not follow one another; the file is damaged or of another kind")
    bin_size = bin_path.stat().st_size
    complete = {dtype for dtype in fitting if index.tokens * dtype.itemsize == bin_size}
    if not complete:
        expected = sorted({index.tokens * dtype.itemsize for dtype in fitting})
        wanted = " or ".join(map(str, expected))
        kind = "truncated" if bin_size < index.tokens * min(d.itemsize for d in fitting) else "not of this index"
        raise UserError(f"{bin_path}: has {bin_size} bytes, its index says {wanted}: {kind}")
    integers = sorted((dtype for dtype in complete if dtype.kind in "iu"), key=str)
    if not integers:
        found = " or ".join(sorted(dtype.name for dtype in complete))
        raise UserError(f"{bin_path}: holds {found} numbers (dtype code {index.code}); expected integer token ids")
    if len(integers) > 1:
        found = " or ".join(dtype.name for dtype in integers)
        raise UserError(
            f"{index.path}: ambiguous: dtype code {index.code} may mean {found}, and nothing in the files says which"
        )
    return integers[0]
