"""The documents of a token store: where each of them ends.

Megatron-LM's index has them. For fairseq's dialect they are in `PREFIX.documents.npy`: for each document, in ascending
order, the number of tokens up to its end.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from megatron_style.base.errors import UserError
from megatron_style.base.files import StreamedFile
from megatron_style.data.index import OFFSET, Entries, Index

DOCUMENTS_SUFFIX = ".documents.npy"
_HEADER_SIZE = 128  # of a .npy with one dimension, whatever its length
Places = NDArray[np.int64]


class DocumentsWriter(StreamedFile):
    """Writes PREFIX.documents.npy as a stream."""

    def __init__(self, path: Path, *, documents: int = 0) -> None:
        """Begin a file, or with `documents` continue one that has at least as many."""
        self.documents = documents
        super().__init__(path.open("r+b" if documents else "w+b"))
        self._write_header()
        self._file.truncate(_HEADER_SIZE + documents * OFFSET.itemsize)
        self._file.seek(0, os.SEEK_END)

    def append(self, ends: NDArray[Any]) -> None:
        self._file.write(ends.astype(OFFSET, copy=False).tobytes())
        self.documents += len(ends)

    def complete(self) -> None:
        self._write_header()
        self.sync()

    def _write_header(self) -> None:
        self._file.seek(0)
        header = {"descr": OFFSET.str, "fortran_order": False, "shape": (self.documents,)}
        np.lib.format.write_array_header_1_0(self._file, header)
        assert self._file.tell() == _HEADER_SIZE, "numpy writes another header"


class Documents(Protocol):
    """Where the documents of a store begin and end."""

    def __len__(self) -> int: ...

    def starts_of(self, places: Places) -> Places:
        """Return the first token of the document to which each of these tokens belongs."""

    def check(self, tokens: int) -> None:
        """Read all entries, and refuse documents that do not follow one another."""


class DocumentEnds(Documents):
    """The documents of PREFIX.documents.npy."""

    def __init__(self, path: Path) -> None:
        self._ends = _npy_entries(path)

    def __len__(self) -> int:
        return self._ends.count

    def starts_of(self, places: Places) -> Places:
        ends = self._ends.mapped()
        document = np.searchsorted(ends, places, side="right")
        return np.where(document > 0, ends[np.maximum(document - 1, 0)], 0)

    def check(self, tokens: int) -> None:
        last = 0
        for block in self._ends.blocks():
            if int(block[0]) <= last or bool((np.diff(block) <= 0).any()):
                raise self._damaged("its documents do not follow one another")
            last = int(block[-1])
        if last > tokens:
            raise self._damaged(f"its last document ends at token {last} of {tokens}")

    def _damaged(self, reason: str) -> UserError:
        return UserError(f"{self._ends.path}: {reason}; remove it, or prepare the corpus again")


class DocumentLines(Documents):
    """The documents of an index in Megatron-LM's dialect, which are ranges of its lines."""

    def __init__(self, index: Index, documents: Entries, itemsize: int) -> None:
        self._index = index
        self._documents = documents
        self._itemsize = itemsize

    def __len__(self) -> int:
        return max(0, self._documents.count - 1)

    def starts_of(self, places: Places) -> Places:
        offsets = self._index.offsets.mapped()
        documents = self._documents.mapped()
        line = np.searchsorted(offsets, places * self._itemsize, side="right") - 1
        first = documents[np.maximum(np.searchsorted(documents, line, side="right") - 1, 0)]
        starts: Places = offsets[np.minimum(first, line)] // self._itemsize
        return starts

    def check(self, tokens: int) -> None:
        """Nothing is left to check: the index has been."""


def documents_file(bin_path: Path) -> Path:
    return bin_path.with_name(bin_path.name.removesuffix(".bin") + DOCUMENTS_SUFFIX)


def _npy_entries(path: Path) -> Entries:
    try:
        with path.open("rb") as file:
            version = np.lib.format.read_magic(file)
            assert version == (1, 0)
            shape, _, dtype = np.lib.format.read_array_header_1_0(file)
            entries = Entries(path, dtype, file.tell(), shape[0])
    except (ValueError, AssertionError, IndexError) as error:
        raise UserError(f"{path}: not a list of documents ({error}); remove it, or prepare the corpus again") from error
    if dtype != OFFSET or len(shape) != 1 or entries.end != path.stat().st_size:
        raise UserError(f"{path}: not a complete list of int64 numbers; remove it, or prepare the corpus again")
    return entries
