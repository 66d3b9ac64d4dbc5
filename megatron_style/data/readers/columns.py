"""Parquet and Arrow files as batches of rows of one column, read by pyarrow."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_style.base.errors import UserError

_BATCH_ROWS = 64  # few, since a row may be a book
_ARROW_FILE = b"ARROW1"
_STREAM_END = b"\xff\xff\xff\xff\0\0\0\0"
Texts = list[bytes | None]


def parquet_rows(path: Path, key: str) -> Iterator[Texts]:
    """Yield the texts of the column `key`, row by row; None is a row without one."""
    arrow = pyarrow_library()
    from pyarrow.parquet import ParquetFile

    try:
        # One thread: this process has workers, and must not fork them with threads.
        with ParquetFile(path, memory_map=True, pre_buffer=False) as file:
            _check_column(arrow, path, file.schema_arrow, key)
            for batch in file.iter_batches(_BATCH_ROWS, columns=[key], use_threads=False):
                yield _as_bytes(arrow, batch.column(0)).to_pylist()
    except (arrow.ArrowException, OSError) as error:
        raise _damage(path, "Parquet", error) from error


def arrow_rows(path: Path, key: str) -> Iterator[Texts]:
    """Yield the texts of the column `key` of an Arrow stream, as `datasets` saves it, or of an Arrow file."""
    arrow = pyarrow_library()
    try:
        with arrow.memory_map(str(path)) as file:
            for batch in _batches(arrow, path, file):
                _check_column(arrow, path, batch.schema, key)
                texts = _as_bytes(arrow, batch.column(batch.schema.get_field_index(key)))
                for first in range(0, len(texts), _BATCH_ROWS):
                    yield texts.slice(first, _BATCH_ROWS).to_pylist()
    except (arrow.ArrowException, OSError) as error:
        raise _damage(path, "Arrow", error) from error


def _batches(arrow: Any, path: Path, file: Any) -> Iterator[Any]:
    if file.read(len(_ARROW_FILE)) == _ARROW_FILE:
        reader = arrow.ipc.open_file(file)
        for index in range(reader.num_record_batches):
            yield reader.get_batch(index)
        return
    if file.size() < len(_STREAM_END):
        raise EOFError("too short")
    file.seek(file.size() - len(_STREAM_END))
    if file.read(len(_STREAM_END)) != _STREAM_END:
        raise UserError(f"{path}: the end of its Arrow stream is missing, so the file is truncated; save it again")
    file.seek(0)
    yield from arrow.ipc.open_stream(file)


def _as_bytes(arrow: Any, column: Any) -> Any:
    """Return the column with its strings as bytes, which need not be UTF-8. An offset that points outside of the data
    would end the process, so all are checked."""
    if arrow.types.is_dictionary(column.type):
        column.validate(full=True)
        column = column.dictionary_decode()
    binary = arrow.large_binary() if arrow.types.is_large_string(column.type) else arrow.binary()
    column = column.view(binary)
    column.validate(full=True)
    return column


def _check_column(arrow: Any, path: Path, schema: Any, key: str) -> None:
    if key not in schema.names:
        raise UserError(f"{path}: has no column `{key}`; it has {', '.join(schema.names)}: name one with --key")
    kind = schema.field(key).type
    if arrow.types.is_dictionary(kind):
        kind = kind.value_type
    if not (arrow.types.is_string(kind) or arrow.types.is_large_string(kind)):
        raise UserError(f"{path}: its column `{key}` holds {kind}; expected strings: name another with --key")


def _damage(path: Path, kind: str, error: Exception) -> Exception:
    if isinstance(error, OSError) and error.errno is not None:  # the disk's, not the data's
        return error
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return UserError(f"{path}: damaged {kind} data ({reason}); fetch or write it again")


def pyarrow_library() -> Any:
    try:
        import pyarrow as library
    except ImportError:
        raise UserError("Parquet and Arrow files need the package `pyarrow`; run `pip install pyarrow`") from None
    return library
