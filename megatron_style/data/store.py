"""The token store: `PREFIX.bin` holds the token ids in sequence, `PREFIX.idx` the length of every line.

A store is opened without reading it. What must be known of all its ids is in the record of `inspection`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_style.base.errors import UserError
from megatron_style.data.documents import DocumentEnds, DocumentLines, Documents, DocumentsWriter, documents_file
from megatron_style.data.index import Entries, Index
from megatron_style.data.index_writer import INDEX_WRITERS
from megatron_style.data.inspection import Inspection, Inspector, inspect_ids, read_record, settled_stamps, write_record


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return the dtype that fairseq chooses, so that the same text gives the same bytes."""
    return np.dtype("<u2") if vocab_size < 65500 else np.dtype("<i4")


def store_files(prefix: Path) -> tuple[Path, Path]:
    """Return the .bin and .idx of a prefix, which may be given as one of the two files."""
    if prefix.suffix in (".bin", ".idx"):
        prefix = prefix.with_suffix("")
    return prefix.with_name(prefix.name + ".bin"), prefix.with_name(prefix.name + ".idx")


@dataclass(frozen=True)
class Written:
    """How much of a store has been written."""

    tokens: int = 0
    lines: int = 0
    documents: int = 0
    document_end: int = 0  # the number of tokens up to the end of the last document


def _checked_files(bin_path: Path) -> list[Path]:
    """Return the files of a store that is there."""
    files = [*store_files(bin_path), documents_file(bin_path)]
    return [path for path in files if path.is_file()]


class TokenStoreWriter:
    """Writes a store as a stream: neither tokens nor sizes are kept in memory."""

    def __init__(self, prefix: Path, vocab_size: int, *, dialect: str = "fairseq", done: Written | None = None) -> None:
        """Begin a store, or continue one of which `done` is on the disk."""
        done = done or Written()
        self.dtype = token_dtype(vocab_size)
        self.done = done
        self._vocab_size = vocab_size
        self._bin_path, idx_path = store_files(prefix)
        self._inspector = Inspector()
        for block in Entries(self._bin_path, self.dtype, 0, done.tokens).blocks() if done.tokens else ():
            self._inspector.add(block)
        self._bin = self._bin_path.open("r+b" if done.tokens else "wb")
        self._bin.truncate(done.tokens * self.dtype.itemsize)
        self._bin.seek(0, os.SEEK_END)
        entries = done.lines if dialect == "fairseq" else done.documents
        self._index = INDEX_WRITERS[dialect](idx_path, self.dtype, entries=entries)
        self._documents = DocumentsWriter(documents_file(self._bin_path), documents=done.documents)
        self._index_has_documents = dialect != "fairseq"

    @property
    def tokens(self) -> int:
        return self.done.tokens

    @property
    def lines(self) -> int:
        return self.done.lines

    def append(
        self, ids: NDArray[Any], line_sizes: NDArray[Any], document_ends: Sequence[int] | NDArray[np.int64] = ()
    ) -> None:
        """Add complete lines: their ids in sequence, and the number of ids of each line. `document_ends` holds, for
        each document that ends here, the number of these ids up to its end."""
        assert int(line_sizes.sum()) == len(ids), "sizes and ids disagree"
        assert not len(ids) or (ids.min() >= 0 and ids.max() < self._vocab_size), "an id outside the vocabulary"
        ids = ids.astype(self.dtype, copy=False)
        self._bin.write(ids.tobytes())
        self._inspector.add(ids)
        ends = self.done.tokens + np.asarray(document_ends, np.int64)
        ends = ends[np.diff(ends, prepend=self.done.document_end) > 0]  # a document without tokens is none
        self._index.append(line_sizes, np.diff(ends, prepend=self.done.document_end))
        self._documents.append(ends)
        self.done = Written(
            self.done.tokens + len(ids),
            self.done.lines + len(line_sizes),
            self.done.documents + len(ends),
            int(ends[-1]) if len(ends) else self.done.document_end,
        )

    def sync(self) -> Written:
        """Return what has been written, when it is on the disk: from there the store can be continued."""
        self._bin.flush()
        os.fsync(self._bin.fileno())
        self._index.sync()
        self._documents.sync()
        return self.done

    def close(self) -> None:
        """Complete the index, and return only when the files are on disk, with a record of what is in them."""
        if self.done.document_end < self.done.tokens and (self.done.documents or self._index_has_documents):
            self.append(np.empty(0, self.dtype), np.empty(0, np.int64), [0])
        self._index.complete()
        self._documents.complete()
        self.sync()
        self._close_files()
        if self._index_has_documents or not self.done.documents:
            documents_file(self._bin_path).unlink()
        files = _checked_files(self._bin_path)
        write_record(files, settled_stamps(files), self._inspector.found)

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
        with suppress(OSError):  # closing flushes, which fails again on a full disk and would hide the first error
            self._close_files()

    def _close_files(self) -> None:
        with self._bin, self._index, self._documents:
            pass


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
    def documents(self) -> Documents | None:
        """Return the documents, or None if the store does not say where they end."""
        if self.index.documents is not None:
            return DocumentLines(self.index, self.index.documents, self.dtype.itemsize)
        path = documents_file(self.path)
        return DocumentEnds(path) if path.is_file() else None

    @cached_property
    def inspection(self) -> Inspection:
        """Return what is known of all ids. A store that has no valid record is read completely, and then has one."""
        files = _checked_files(self.path)
        if (known := read_record(files)) is not None:
            return known
        stamps = settled_stamps(files)
        self.index.check(self.dtype)
        if self.documents is not None:
            self.documents.check(len(self))
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
