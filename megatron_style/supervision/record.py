"""What a run tells others on disk: `ranks/rank_00003.json`, one for each rank, and at its end `status.json`."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, get_args

from megatron_style.base.files import write_atomic
from megatron_style.base.json_text import parse_json
from megatron_style.base.run_folder import RunFolder, step_of
from megatron_style.supervision.process import Process

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
    key: str = ""  # of the launcher that started it: LAUNCH of its environment
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


_MOST_BYTES = 2**16
_HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


def now() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")


def write_record(folder: Path, record: RankRecord) -> None:
    """On a full disk the file that is there is touched: a sign of life all the same."""
    path = RunFolder(folder).record(record.rank)
    try:
        _write(path, asdict(record))
    except OSError:
        os.utime(path)


def read_records(folder: Path, ranks: Iterable[int] | None = None) -> dict[int, Seen]:
    """Of these ranks or of all; those that are not there are left out."""
    home = RunFolder(folder)
    try:
        there = sorted(os.listdir(home.ranks))  # noqa: PTH208 - listing also makes network disks look again
    except OSError:
        return {}
    wanted = None if ranks is None else {home.record(rank).name for rank in ranks}
    found = {}
    for name in there:
        if name.endswith(".json") and (wanted is None or name in wanted):
            seen = _read_record(home.ranks / name)
            if seen:
                found[seen.record.rank] = seen
    return found


def write_status(folder: Path, status: Status) -> None:
    _write(RunFolder(folder).status, asdict(status))


def read_status(folder: Path) -> Status | None:
    try:
        with RunFolder(folder).status.open("rb") as file:
            status = Status(**parse_json(file.read(_MOST_BYTES)))
    except (OSError, ValueError, TypeError):
        return None
    return status if status.state in get_args(State) and _is_number(status.step) else None


def saved_step(folder: Path) -> int | None:
    """Return the step of the run's newest checkpoint; None without one."""
    try:
        name = RunFolder(folder).latest.read_text(encoding="utf-8")
    except OSError:
        return None
    return step_of(name)


def what_is_lost(folder: Path, step: int) -> str:
    """Say what a run that ends at this step leaves."""
    saved = saved_step(folder)
    if saved is None:
        return f"no checkpoint has been written; {f'all {step} steps are lost' if step else 'nothing was trained'}"
    if saved >= step:
        return f"the checkpoint of step {saved} holds all of it"
    return f"the steps after the checkpoint of step {saved} are lost"


def _read_record(path: Path) -> Seen | None:
    try:
        with path.open("rb") as file:
            content, changed = file.read(_MOST_BYTES), os.fstat(file.fileno()).st_mtime_ns
        record = RankRecord(**parse_json(content))
    except (OSError, ValueError, TypeError):
        return None
    return Seen(record, (changed, content)) if _is_sound(record) else None


def _is_sound(record: RankRecord) -> bool:
    """True if every field is of its kind. A run's folder may come from a stranger, and what a record says goes into
    commands on other hosts."""
    return (
        is_sound_process(record)
        and all(_is_number(number) for number in (record.rank, record.step, record.beats))
        and all(type(text) is str for text in (record.launch, record.key, record.time, record.during, record.error))
        and record.phase in get_args(Phase)
        and record.follows in get_args(Follows)
    )


def is_sound_process(process: Process) -> bool:
    """True if every field is of its kind, and the host has the name of one."""
    return (
        _is_number(process.pid)
        and process.pid > 0
        and _is_number(process.started)
        and type(process.place) is str
        and type(process.host) is str
        and _HOST.fullmatch(process.host) is not None
    )


def _is_number(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _write(path: Path, data: dict[str, Any]) -> None:
    write_atomic(path, json.dumps(data) + "\n")
