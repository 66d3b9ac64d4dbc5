"""The token store: `PREFIX.bin` holds the token ids in sequence, `PREFIX.idx` the length of every line.

A store is opened without reading it. What must be known of all its ids is in the record of `inspection`.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_style.base.errors import UserError
from megatron_style.data.index import BLOCK, DTYPE_CODES, HEADER, MAGIC, OFFSET, SIZE, VERSION, Entries, Index
from megatron_style.data.inspection import Inspection, Inspector, inspect_ids, read_record, settled_stamps, write_record


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
        self._inspector = Inspector()
        self._files = store_files(prefix)
        bin_path, idx_path = self._files
        self._bin = bin_path.open("wb")
        self._idx = idx_path.open("w+b")
        self._write_header()  # again at the end, with the number of lines

    def append(self, ids: NDArray[Any], line_sizes: NDArray[Any]) -> None:
        """Add complete lines: their ids in sequence, and the number of ids of each line."""
        assert int(line_sizes.sum()) == len(ids), "sizes and ids disagree"
        assert not len(ids) or (ids.min() >= 0 and ids.max() < self._vocab_size), "an id outside the vocabulary"
        ids = ids.astype(self.dtype, copy=False)
        self._bin.write(ids.tobytes())
        self._inspector.add(ids)
        self._idx.write(line_sizes.astype(SIZE, copy=False).tobytes())
        self.tokens += len(ids)
        self.lines += len(line_sizes)

    def close(self) -> None:
        """Complete the index, and return only when both files are on disk, with a record of what is in them."""
        self._write_offsets()
        self._idx.seek(0)
        self._write_header()
        for file in (self._bin, self._idx):
            file.flush()
            os.fsync(file.fileno())
            file.close()
        write_record(self._files, settled_stamps(self._files), self._inspector.found)

    @property
    def sha256(self) -> str:
        """Return the digest of the .bin so far."""
        return self._inspector.found.sha256

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
    index: Index
    dtype: np.dtype[Any]

    def __len__(self) -> int:
        return self._ids.count

    @cached_property
    def tokens(self) -> NDArray[Any]:
        """Return all ids as one flat, read-only stream."""
        return self._ids.mapped()

    @property
    def line_sizes(self) -> NDArray[Any]:
        """Return the number of ids of each line."""
        return self.index.sizes.mapped()

    @cached_property
    def inspection(self) -> Inspection:
        """Return what is known of all ids. A store that has no valid record is read completely, and then has one."""
        files = (self.path, self.index.path)
        if (known := read_record(files)) is not None:
            return known
        stamps = settled_stamps(files)
        self.index.check(self.dtype)
        found = inspect_ids(self._ids)
        write_record(files, stamps, found)
        return found

    def check_ids(self, vocab_size: int) -> None:
        """Refuse ids outside the vocabulary: they would read beyond the embedding's end."""
        found = self.inspection
        if found.largest_id >= vocab_size:
            raise UserError(
                f"{self.path}: token {found.largest_at} is id {found.largest_id}, outside the vocabulary of "
                f"{vocab_size}; the store and the dictionary must belong together"
            )

    @cached_property
    def _ids(self) -> Entries:
        return Entries(self.path, self.dtype, 0, self.path.stat().st_size // self.dtype.itemsize)


def open_store(prefix: Path | str, vocab_size: int | None = None, *, check: bool = True) -> TokenStore:
    """Open PREFIX.bin and PREFIX.idx in any of the dialects; with `vocab_size`, check every id against it. Without
    `check`, another process checks the store."""
    bin_path, idx_path = store_files(Path(prefix))
    for path in (bin_path, idx_path):
        if not path.is_file():
            raise UserError(f"{path}: no such file; a token store is {bin_path.name} and {idx_path.name}")
    index = Index.read(idx_path)
    store = TokenStore(bin_path, index, index.dtype_of(bin_path))
    if not len(store):
        raise UserError(f"{bin_path}: holds no tokens; expected at least one")
    if check:
        _ = store.inspection
    if vocab_size is not None:
        store.check_ids(vocab_size)
    return store
