"""The state of a run on disk: `ranks/rank_00003.json`, one for each rank, and `status.json` when it has ended."""

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
    beats: int = 0  # makes every record of a rank differ from its last
    during: str = ""  # the phase in which it failed
    error: str = ""
    key: str = ""  # of the launch that started it, from LAUNCH in its environment
    follows: Follows = ""  # it fails because another rank did: it waits to learn which one, or has left and reported it


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
    """A record, and a mark of its file that changes with every heartbeat, even on a full disk."""

    record: RankRecord
    mark: tuple[int, bytes]


_MOST_BYTES = 2**16
_HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


def now() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")


def write_record(folder: Path, record: RankRecord) -> None:
    """Write a heartbeat. On a full disk the old file is touched, which also counts as one."""
    path = RunFolder(folder).record(record.rank)
    try:
        _write(path, asdict(record))
    except OSError:
        os.utime(path)


def read_records(folder: Path, ranks: Iterable[int] | None = None) -> dict[int, Seen]:
    """Return the records of these ranks, or of all; missing ones are left out."""
    run_folder = RunFolder(folder)
    try:
        names = sorted(os.listdir(run_folder.ranks))  # noqa: PTH208 - listing also makes network disks refresh
    except OSError:
        return {}
    wanted = None if ranks is None else {run_folder.record(rank).name for rank in ranks}
    found = {}
    for name in names:
        if name.endswith(".json") and (wanted is None or name in wanted):
            seen = _read_record(run_folder.ranks / name)
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
    """Return a clause that says what is lost when a run ends at this step."""
    saved = saved_step(folder)
    if saved is None:
        return f"no checkpoint has been written; {f'all {step} steps are lost' if step else 'nothing was trained'}"
    if saved >= step:
        return f"nothing is lost: the last checkpoint is of step {saved}"
    return f"the steps after the checkpoint of step {saved} are lost"


def _read_record(path: Path) -> Seen | None:
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES)
            changed = os.fstat(file.fileno()).st_mtime_ns
        record = RankRecord(**parse_json(content))
    except (OSError, ValueError, TypeError):
        return None
    return Seen(record, (changed, content)) if _is_sound(record) else None


def _is_sound(record: RankRecord) -> bool:
    """True if every field has its type. The folder of a run may not be trustworthy, and fields of a record end up in
    commands on other hosts."""
    return (
        is_sound_process(record)
        and all(_is_number(number) for number in (record.rank, record.step, record.beats))
        and all(type(text) is str for text in (record.launch, record.key, record.time, record.during, record.error))
        and record.phase in get_args(Phase)
        and record.follows in get_args(Follows)
    )


def is_sound_process(process: Process) -> bool:
    """True if every field has its type, and the host has a valid name."""
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
