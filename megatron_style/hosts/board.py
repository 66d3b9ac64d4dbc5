"""A small file in memory that the processes of one host share: each writes its own slot, and all read all slots."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SLOT_BYTES = 4096
_IN_MEMORY = Path("/dev/shm")  # a file there has no name as soon as all have opened it


class Board:
    """One process's view of the board. Nothing of it is left when the last process has ended, however it ended."""

    def __init__(self, file: int, slots: int, own: int) -> None:
        self._file = file
        self._slots = slots
        self._own = own

    def write(self, content: bytes) -> None:
        assert len(content) <= SLOT_BYTES
        os.pwrite(self._file, content.ljust(SLOT_BYTES, b"\0"), self._own * SLOT_BYTES)

    def read(self) -> list[bytes]:
        """Return the content of all slots; that of a process that has written nothing is empty."""
        content = os.pread(self._file, self._slots * SLOT_BYTES, 0)
        slots = range(0, self._slots * SLOT_BYTES, SLOT_BYTES)
        return [content[first : first + SLOT_BYTES].rstrip(b"\0") for first in slots]

    def close(self) -> None:
        os.close(self._file)


@contextmanager
def new_board(slots: int) -> Iterator[Path]:
    """Make a board, and yield its path until the processes have opened it."""
    folder = _IN_MEMORY if os.access(_IN_MEMORY, os.W_OK) else None
    file, name = tempfile.mkstemp(prefix="megatron_style.", dir=folder)
    try:
        os.ftruncate(file, slots * SLOT_BYTES)
        os.close(file)
        yield Path(name)
    finally:
        Path(name).unlink(missing_ok=True)


def open_board(path: Path, slots: int, own: int) -> Board:
    return Board(os.open(path, os.O_RDWR | os.O_CLOEXEC), slots, own)
