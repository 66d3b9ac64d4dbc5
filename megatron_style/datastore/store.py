"""The files of a datastore: `keys.bin` and `values.bin`, with one row per token of the text, and `manifest.json`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_style.base.errors import UserError
from megatron_style.base.json_text import parse_json
from megatron_style.config.datastore import DatastoreManifest

MANIFEST = "manifest.json"
KEYS = "keys.bin"
VALUES = "values.bin"
VALUE = np.dtype("<i4")


@dataclass(frozen=True)
class Datastore:
    """A datastore on disk. Keys and values are mapped when they are first used; nothing is read in advance."""

    folder: Path
    manifest: DatastoreManifest

    @cached_property
    def keys(self) -> NDArray[Any]:
        shape = (self.manifest.count, self.manifest.hidden_size)
        return np.memmap(self.folder / KEYS, key_dtype(self.manifest), mode="r", shape=shape)

    @cached_property
    def values(self) -> NDArray[Any]:
        return np.memmap(self.folder / VALUES, VALUE, mode="r", shape=(self.manifest.count,))

    def tokens_at(self, rows: Tensor) -> Tensor:
        """Return the value of each row; -1 for row -1, which is none."""
        tokens = torch.from_numpy(self.values[rows.clamp(min=0).numpy()].astype(np.int64))
        if int(tokens.min()) < 0 or int(tokens.max()) >= self.manifest.vocab_size:
            raise UserError(
                f"{self.folder / VALUES}: holds ids outside the vocabulary of {self.manifest.vocab_size}; build the "
                f"datastore again"
            )
        return tokens.masked_fill(rows < 0, -1)


def key_dtype(manifest: DatastoreManifest) -> np.dtype[Any]:
    return np.dtype(manifest.dtype).newbyteorder("<")


def open_datastore(folder: Path) -> Datastore:
    manifest = read_manifest(folder)
    for name, expected in ((KEYS, manifest.key_bytes), (VALUES, manifest.value_bytes)):
        path = folder / name
        if not path.is_file():
            raise UserError(f"{path}: no such file; the datastore is not complete, build it again")
        if (size := path.stat().st_size) != expected:
            raise UserError(f"{path}: has {size} bytes, {MANIFEST} says {expected}; build the datastore again")
    return Datastore(folder, manifest)


def read_manifest(folder: Path) -> DatastoreManifest:
    path = folder / MANIFEST
    try:
        data = parse_json(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{folder}: no datastore (with {MANIFEST}) there; `neighbours build` makes one") from None
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON: {error}") from None
    return DatastoreManifest.parse(data, source=str(path))
