"""A token store of any size, as a sparse file."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from megatron_style.data.index import HEADER, MAGIC
from megatron_style.data.inspection import Inspection, stamps_of, write_record
from megatron_style.data.store import store_files

_LINE = 2**31 - 1  # the longest that an index can say


def write_huge_store(prefix: Path, tokens: int) -> None:
    """Write a store of zeros that takes no space on the disk, with the record that `prepare` would have left."""
    files = store_files(prefix)
    with files[0].open("wb") as file:
        file.truncate(2 * tokens)
    sizes = np.full(-(-tokens // _LINE), _LINE, np.int64)
    sizes[-1] = tokens - int(sizes[:-1].sum())
    offsets = 2 * (np.cumsum(sizes) - sizes)
    header = HEADER.pack(MAGIC, 1, 8, len(sizes))
    files[1].write_bytes(header + sizes.astype("<i4").tobytes() + offsets.astype("<i8").tobytes())
    write_record(files, stamps_of(files), Inspection("0" * 64, tokens, largest_id=0, largest_at=0))
