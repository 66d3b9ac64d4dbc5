"""Input files of `prepare`, in every format."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import zstandard

COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": lambda data: zstandard.ZstdCompressor().compress(data),
}


def write_input(path: Path, texts: Sequence[object], key: str = "text") -> Path:
    """Write the texts in the format that the name says; a text file has them one after the other."""
    kind, end = (path.suffixes[-2:] if path.suffix in COMPRESS else [path.suffix, ""])[-2:]
    if kind == ".parquet":
        pa.parquet.write_table(pa.table({"id": range(len(texts)), key: texts}), path, row_group_size=2)
    elif kind == ".arrow":
        table = pa.table({key: texts})
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table, max_chunksize=2)
    elif kind == ".jsonl":
        path.write_bytes(COMPRESS[end]("".join(json.dumps({"id": 1, key: text}) + "\n" for text in texts).encode()))
    else:
        path.write_bytes(COMPRESS[end]("".join(f"{text}\n" for text in texts).encode()))
    return path
