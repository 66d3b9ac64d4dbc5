"""Safetensors files, written and read with one tensor in memory at a time; the library needs all of them at once."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_style.base.errors import UserError
from megatron_style.base.json_text import parse_json
from megatron_style.base.model_files import INDEX, WEIGHTS, shard_name
from megatron_style.checkpoint.manifest import is_file_name

_READABLE = ("F16", "BF16", "F32", "F64")


@dataclass(frozen=True)
class Entry:
    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def size(self) -> int:
        return (8 if self.dtype == "F64" else 4) * math.prod(self.shape)


def write_sharded(folder: Path, entries: Sequence[Entry], tensors: Iterator[Tensor], *, shard_bytes: int) -> None:
    """Write `model.safetensors` or, if it would be larger than `shard_bytes`, several files and their index."""
    shards = _shards(entries, shard_bytes)
    if len(shards) == 1:
        write_tensors(folder / WEIGHTS, entries, tensors)
        return
    files: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = shard_name(number, len(shards))
        write_tensors(folder / name, shard, tensors)
        files |= {entry.name: name for entry in shard}
    index = {"metadata": {"total_size": sum(entry.size for entry in entries)}, "weight_map": files}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _shards(entries: Sequence[Entry], shard_bytes: int) -> list[list[Entry]]:
    """Fill one shard after the other. A tensor that is larger has a shard of its own."""
    shards: list[list[Entry]] = [[]]
    filled = 0
    for entry in entries:
        if shards[-1] and filled + entry.size > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(entry)
        filled += entry.size
    return shards


def write_tensors(path: Path, entries: Sequence[Entry], tensors: Iterator[Tensor]) -> None:
    """Write a file with the next tensors."""
    header = {}
    offset = 0
    for entry in entries:
        offsets = [offset, offset + entry.size]
        header[entry.name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": offsets}
        offset += entry.size
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for entry in entries:
            # A loop over the iterator would hold each tensor while it makes the next.
            file.write(_bytes_of(next(tensors), entry))


def _bytes_of(tensor: Tensor, entry: Entry) -> memoryview:
    assert tuple(tensor.shape) == entry.shape, (entry, tensor.shape)
    content = tensor.detach().contiguous().numpy()
    return content.astype(content.dtype.newbyteorder("<"), copy=False).data


@dataclass(frozen=True)
class Stored:
    """A tensor in a file, read when asked for."""

    shape: tuple[int, ...]
    get: Callable[[], Tensor]


def weights_file(folder: Path) -> Path:
    """Return the file that lists a folder's weights: the only one, or the index of several."""
    is_sharded = (folder / INDEX).exists() and not (folder / WEIGHTS).exists()
    return folder / (INDEX if is_sharded else WEIGHTS)


def open_sharded(folder: Path) -> dict[str, Stored]:
    """Return all weights of a folder by name, from one file or several."""
    path = weights_file(folder)
    if path.name == WEIGHTS:
        return open_tensors(path)
    files = _read_index(path)
    opened = {name: open_tensors(folder / name) for name in sorted(set(files.values()))}
    for name, file in files.items():
        if name not in opened[file]:
            raise UserError(f"{path}: says that '{name}' is in {file}, which does not hold it")
    return {name: opened[file][name] for name, file in files.items()}


def _read_index(path: Path) -> dict[str, str]:
    """Return which file of the folder holds each tensor."""
    try:
        data = parse_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON: {error}") from None
    files = data.get("weight_map") if isinstance(data, dict) else None
    if not isinstance(files, dict) or not files:
        raise UserError(f"{path}: lacks 'weight_map', which names the file of each tensor")
    for name, file in files.items():
        if not isinstance(file, str) or not is_file_name(file):
            raise UserError(f"{path}: says that '{name}' is in {file!r:.60}; a file of the same folder is expected")
    return files


def open_tensors(path: Path) -> dict[str, Stored]:
    try:
        file = safe_open(path, framework="pt")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except SafetensorError as error:
        raise UserError(f"{path}: not a complete safetensors file: {error}") from None
    stored = {}
    for name in file.keys():  # noqa: SIM118 - it is not a mapping
        held = file.get_slice(name)
        if held.get_dtype() not in _READABLE:
            raise UserError(f"{path}: '{name}' is of type {held.get_dtype()}; use one of {', '.join(_READABLE)}")
        stored[name] = Stored(tuple(held.get_shape()), partial(file.get_tensor, name))
    return stored
