"""A store is read completely once: when it is made, or when it is first seen. `PREFIX.checked.json` records the result,
so that the time of a start does not depend on the size of the corpus.

The record has the size and modification time of both files. If one of them differs, or the record is damaged, the
store is read again. For a read-only folder, the record is kept in the user's cache.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_style.base.command import log
from megatron_style.base.errors import UserError
from megatron_style.base.files import DEFAULT_CACHE
from megatron_style.base.json_text import parse_json
from megatron_style.data.index import BLOCK, Entries
from megatron_style.data.progress import byte_progress

RECORD_SUFFIX = ".checked.json"
_FORMAT = 1
_CLOCK_TICK = 0.02  # seconds; twice the coarsest tick of Linux
Stamps = Mapping[str, list[int]]


@dataclass(frozen=True)
class Inspection:
    """What was found when all ids of a store were read. No id is negative."""

    sha256: str  # of the .bin
    tokens: int
    largest_id: int
    largest_at: int  # the first token with that id


class Inspector:
    """Looks at the ids of a store block by block."""

    def __init__(self) -> None:
        self._sha256 = hashlib.sha256()
        self._tokens = 0
        self._largest_id = -1
        self._largest_at = 0

    def add(self, ids: NDArray[Any]) -> None:
        """Look at the next ids, which are of the dtype of the store."""
        self._sha256.update(np.ascontiguousarray(ids).data)
        if len(ids):
            at = int(ids.argmax())
            if int(ids[at]) > self._largest_id:
                self._largest_id = int(ids[at])
                self._largest_at = self._tokens + at
        self._tokens += len(ids)

    @property
    def found(self) -> Inspection:
        return Inspection(self._sha256.hexdigest(), self._tokens, self._largest_id, self._largest_at)


def inspect_ids(ids: Entries) -> Inspection:
    """Read all ids of a .bin; negative ones are refused."""
    inspector = Inspector()
    with byte_progress(f"checking {ids.path}", ids.end, quiet_seconds=2) as advance:
        for number, block in enumerate(ids.blocks()):
            if int(block.min()) < 0:
                at = int(np.argmax(block < 0))
                raise UserError(
                    f"{ids.path}: token {number * BLOCK + at} is id {int(block[at])}; the file is damaged or of "
                    "another kind"
                )
            inspector.add(block)
            advance(block.nbytes)
    return inspector.found


def read_record(files: Sequence[Path]) -> Inspection | None:
    """Return what was found in these files, or None if that is not known or if they have changed since."""
    for path in _places(files[0]):
        with suppress(OSError, ValueError, LookupError, TypeError, AttributeError):  # a damaged record is no record
            record = parse_json(path.read_bytes())
            if record["digest"] == _digest(record["store"]) and record["store"]["files"] == stamps_of(files):
                return Inspection(**record["store"]["found"])
    return None


def write_record(files: Sequence[Path], stamps: Stamps, found: Inspection) -> None:
    """Keep what was found next to the store, or else in the user's cache. `stamps` are those of before the files were
    read, so that a change in the meantime is noticed."""
    store = {"format": _FORMAT, "files": stamps, "found": asdict(found)}
    text = json.dumps({"store": store, "digest": _digest(store)}, indent=1) + "\n"
    for path in _places(files[0]):
        with suppress(OSError):
            _write(path, text)
            return
    log(
        f"{files[0]}: checked, but the result cannot be recorded in its folder or in {DEFAULT_CACHE}; "
        "every start will check it again"
    )


def record_path(bin_path: Path) -> Path:
    return bin_path.with_name(bin_path.name.removesuffix(".bin") + RECORD_SUFFIX)


def _places(bin_path: Path) -> list[Path]:
    """Return where the record may be: next to the store, or in the user's cache."""
    places = [record_path(bin_path)]
    address = hashlib.sha256(os.fsencode(bin_path.resolve())).hexdigest()[:32]
    with suppress(RuntimeError):  # a user without a home
        places.append(DEFAULT_CACHE.expanduser() / "stores" / f"{address}{RECORD_SUFFIX}")
    return places


def settled_stamps(files: Sequence[Path]) -> Stamps:
    """Return the stamps, when the clock of the file system has moved on: a later change gets a later time."""
    newest = max(path.stat().st_mtime for path in files)
    time.sleep(min(_CLOCK_TICK, max(0.0, newest + _CLOCK_TICK - time.time())))
    return stamps_of(files)


def stamps_of(files: Sequence[Path]) -> Stamps:
    """Return the size and the modification time of each file."""
    stats = {path.suffix: path.stat() for path in files}
    return {suffix: [stat.st_size, stat.st_mtime_ns] for suffix, stat in stats.items()}


def _digest(store: Any) -> str:
    return hashlib.sha256(json.dumps(store, sort_keys=True).encode()).hexdigest()[:16]


def _write(path: Path, text: str) -> None:
    """Replace the file atomically, under a temporary name of this process: several may write at the same time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.parent.stat().st_mode & 0o222:  # root could write here nevertheless
        raise PermissionError(f"{path.parent}: is read-only")
    new = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        new.write_text(text, encoding="utf-8")
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)
