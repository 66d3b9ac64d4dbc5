"""What a run tells others on disk: `ranks/rank_00003.json`, one for each rank, and at its end `status.json`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from megatron_style.runtime.process import Process

Phase = Literal["preflight", "training", "evaluating", "saving", "ended", "failed"]
Follows = Literal["", "waiting", "left"]
State = Literal["finished", "stopped", "failed", "diverged"]


@dataclass(frozen=True)
class RankRecord(Process):
    rank: int
    launch: str  # common to all ranks of one launch
    step: int
    phase: Phase
    time: str
    beats: int = 0  # no two records of a living rank are equal
    during: str = ""  # the phase in which it failed
    error: str = ""
    follows: Follows = ""  # it fails because another rank did: it waits to learn which, or has left and said so


@dataclass(frozen=True)
class Status:
    """How the last launch ended. A launch that was killed leaves the status of the one before."""

    launch: str
    state: State
    step: int
    time: str
    error: str = ""


@dataclass(frozen=True)
class Seen:
    """A record and what its file looked like: it changes with every sign of life, also on a full disk."""

    record: RankRecord
    mark: tuple[int, bytes]


def now() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")


def record_path(folder: Path, rank: int) -> Path:
    return folder / "ranks" / f"rank_{rank:05d}.json"


def write_record(folder: Path, record: RankRecord) -> None:
    """On a full disk the file that is there is touched: a sign of life all the same."""
    path = record_path(folder, record.rank)
    try:
        _write(path, asdict(record))
    except OSError:
        os.utime(path)


def read_records(folder: Path, ranks: Iterable[int] | None = None) -> dict[int, Seen]:
    """Of these ranks or of all; those that are not there are left out."""
    try:
        there = sorted(os.listdir(folder / "ranks"))  # noqa: PTH208 - listing also makes network disks look again
    except OSError:
        return {}
    wanted = None if ranks is None else {record_path(folder, rank).name for rank in ranks}
    found = {}
    for name in there:
        if name.endswith(".json") and (wanted is None or name in wanted):
            seen = _read_record(folder / "ranks" / name)
            if seen:
                found[seen.record.rank] = seen
    return found


def write_status(folder: Path, status: Status) -> None:
    _write(folder / "status.json", asdict(status))


def read_status(folder: Path) -> Status | None:
    try:
        return Status(**json.loads((folder / "status.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def _read_record(path: Path) -> Seen | None:
    try:
        with path.open("rb") as file:
            content, changed = file.read(), os.fstat(file.fileno()).st_mtime_ns
        return Seen(RankRecord(**json.loads(content)), (changed, content))
    except (OSError, ValueError, TypeError):
        return None


def _write(path: Path, data: dict[str, Any]) -> None:
    new = path.with_suffix(".new")
    new.write_text(json.dumps(data) + "\n", encoding="utf-8")
    new.replace(path)
