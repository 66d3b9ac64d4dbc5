"""Write the index of a token store as a stream: neither sizes nor offsets are kept in memory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_style.base.errors import UserError
from megatron_style.base.files import StreamedFile
from megatron_style.data.index import BLOCK, DOCUMENT_COUNT, DTYPE_CODES, HEADER, MAGIC, OFFSET, SIZE, VERSION

_LONGEST = int(np.iinfo(SIZE).max)


class IndexWriter(StreamedFile):
    """The .idx in fairseq's dialect: the size and the offset of every line."""

    header_size = HEADER.size

    def __init__(self, path: Path, dtype: np.dtype[Any], *, entries: int = 0) -> None:
        """Begin a file, or with `entries` continue one that has at least as many."""
        self.entries = entries
        self._dtype = dtype
        super().__init__(path.open("r+b" if entries else "w+b"))
        self._write_header()  # again at the end, with the number of entries
        self._file.truncate(self.header_size + entries * SIZE.itemsize)
        self._file.seek(0, os.SEEK_END)

    def append(self, line_sizes: NDArray[Any], document_sizes: NDArray[Any]) -> None:
        """Add lines, and the sizes of the documents that end in them."""
        del document_sizes
        self._append(line_sizes)

    def complete(self) -> None:
        """Write what follows the sizes, and the header."""
        self._write_offsets()
        self._write_header()
        self.sync()

    def _append(self, sizes: NDArray[Any]) -> None:
        self._file.write(sizes.astype(SIZE, copy=False).tobytes())
        self.entries += len(sizes)

    def _write_header(self) -> None:
        code = next(code for code, name in DTYPE_CODES["fairseq"].items() if np.dtype(name) == self._dtype)
        self._file.seek(0)
        self._file.write(HEADER.pack(MAGIC, VERSION, code, self.entries))

    def _write_offsets(self) -> None:
        """Read the sizes back in blocks, and write the offset of each entry after them."""
        offset = 0
        for first in range(0, self.entries, BLOCK):
            self._file.seek(self.header_size + first * SIZE.itemsize)
            count = min(BLOCK, self.entries - first)
            sizes = np.frombuffer(self._file.read(count * SIZE.itemsize), SIZE).astype(np.int64)
            ends = offset + np.cumsum(sizes) * self._dtype.itemsize
            starts = np.concatenate(([offset], ends[:-1]))
            self._file.seek(self.header_size + self.entries * SIZE.itemsize + first * OFFSET.itemsize)
            self._file.write(starts.astype(OFFSET).tobytes())
            offset = int(ends[-1])


class MegatronIndexWriter(IndexWriter):
    """The .idx in Megatron-LM's dialect, as its tools write it: each document is one sequence."""

    header_size = HEADER.size + DOCUMENT_COUNT.size

    def append(self, line_sizes: NDArray[Any], document_sizes: NDArray[Any]) -> None:
        del line_sizes
        if len(document_sizes) and int(document_sizes.max()) > _LONGEST:
            raise UserError(
                f"--format megatron: document {self.entries + int(document_sizes.argmax())} has "
                f"{int(document_sizes.max())} tokens, more than {_LONGEST}; split it, or use --format fairseq"
            )
        self._append(document_sizes)

    def complete(self) -> None:
        self._write_offsets()
        self._file.seek(0, os.SEEK_END)
        for first in range(0, self.entries + 1, BLOCK):
            documents = np.arange(first, min(first + BLOCK, self.entries + 1))
            self._file.write(documents.astype(OFFSET).tobytes())
        self._write_header()
        self.sync()

    def _write_header(self) -> None:
        super()._write_header()
        self._file.write(DOCUMENT_COUNT.pack(self.entries + 1))


INDEX_WRITERS = {"fairseq": IndexWriter, "megatron": MegatronIndexWriter}
