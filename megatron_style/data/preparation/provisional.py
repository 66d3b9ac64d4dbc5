"""The training text is encoded once, while its tokens are counted: with provisional ids, because the final ones are
numbered by those counts. The encoded chunks wait in a file of the work folder until the final ids are known.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from megatron_style.base.files import StreamedFile, atomic_file
from megatron_style.data.preparation.encode import EncodedChunk
from megatron_style.data.preparation.work import SCRATCH_PREFIX

_CHUNKS_FILE = f"{SCRATCH_PREFIX}chunks"
_FINAL_IDS_FILE = f"{SCRATCH_PREFIX}final_ids.npy"


class ChunksWriter(StreamedFile):
    """Appends encoded chunks to the file."""

    def __init__(self, folder: Path, *, done: int = 0) -> None:
        """Begin the file, or continue one of which `done` bytes are on the disk."""
        super().__init__((folder / _CHUNKS_FILE).open("r+b" if done else "wb"))
        self._file.truncate(done)
        self._file.seek(done)

    def append(self, chunk: EncodedChunk, labels: NDArray[Any], *, size: int, closes: bool) -> None:
        """Add a chunk of `size` bytes of text. `labels` has the provisional id of each of the chunk's ids, if the chunk
        numbers its tokens for itself."""
        reason = (chunk.first_left_out or "").encode()
        numbers = np.array([size, closes, chunk.words, chunk.left_out], np.int64)
        record = BytesIO()  # numpy itself writes files without saying why it cannot
        for entries in (chunk.ids, labels, chunk.line_sizes, chunk.document_ends, numbers, np.frombuffer(reason, "u1")):
            np.lib.format.write_array(record, entries, allow_pickle=False)
        self._file.write(record.getbuffer())

    @property
    def size(self) -> int:
        return self._file.tell()


def keep_final_ids(folder: Path, final_ids: NDArray[Any]) -> None:
    """Write the final id of each provisional one, which completes the provisional text."""
    with atomic_file(folder / _FINAL_IDS_FILE) as path, path.open("wb") as file:
        np.save(file, final_ids)


def has_provisional(folder: Path) -> bool:
    """True if the folder has the complete training text with provisional ids."""
    return (folder / _FINAL_IDS_FILE).is_file()


def kept_final_ids(folder: Path) -> NDArray[Any]:
    ids: NDArray[Any] = np.load(folder / _FINAL_IDS_FILE)
    return ids


def kept_chunks(folder: Path, final_ids: NDArray[Any]) -> Iterator[tuple[int, bool, EncodedChunk]]:
    """Yield the size of each chunk's text, whether it closes a file, and the chunk with final ids."""
    with (folder / _CHUNKS_FILE).open("rb") as file:
        end = os.fstat(file.fileno()).st_size
        while file.tell() < end:
            size, closes, labels, chunk = _read_chunk(file)
            table = final_ids[labels] if len(labels) else final_ids
            yield size, closes, replace(chunk, ids=table[chunk.ids])


def _read_chunk(file: BinaryIO) -> tuple[int, bool, NDArray[Any], EncodedChunk]:
    ids, labels, line_sizes, document_ends, numbers, reason = (
        np.lib.format.read_array(file, allow_pickle=False) for _ in range(6)
    )
    size, closes, words, left_out = numbers.tolist()
    first_left_out = reason.tobytes().decode() or None
    chunk = EncodedChunk(ids, line_sizes, document_ends, words, 0, left_out, first_left_out)
    return size, bool(closes), labels, chunk


def remove_provisional(folder: Path) -> None:
    for name in (_FINAL_IDS_FILE, _CHUNKS_FILE):  # in this order, so that what a kill leaves is not taken for complete
        (folder / name).unlink(missing_ok=True)
