"""The files with a model's weights, named as Hugging Face names them: one, or several shards with an index."""

from __future__ import annotations

import re
from pathlib import Path

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARD_BYTES = 5 * 10**9  # of a shard, by default
_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")


def shard_name(number: int, count: int) -> str:
    """Return the name of a shard; the first has number 1."""
    return f"model-{number:05d}-of-{count:05d}.safetensors"


def is_shard(name: str) -> bool:
    return _SHARD.fullmatch(name) is not None


def has_weights(folder: Path) -> bool:
    return (folder / WEIGHTS).is_file() or (folder / INDEX).is_file()


def weight_files(folder: Path) -> list[Path]:
    """Return the files that hold a folder's weights, in order."""
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    return sorted(path for path in folder.iterdir() if is_shard(path.name) or path.name == INDEX)
