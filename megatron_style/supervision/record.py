"""The state of a run on disk: `ranks/host_00000.jsonl`, one for each host, and `status.json` when the run has ended."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, get_args

from megatron_style.base.files import write_atomic
from megatron_style.base.json_text import parse_json
from megatron_style.base.run_folder import RunFolder, step_of
from megatron_style.hosts.board import SLOT_BYTES
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
    """A record, and a mark that changes with every heartbeat, even on a full disk. Step, time and beats of the record
    may be those of an earlier heartbeat: most are only compared, not parsed."""

    record: RankRecord
    mark: tuple[int, bytes]  # touches of its file, and its line

    @property
    def latest(self) -> RankRecord:
        """Return the record of the last heartbeat."""
        return parse_record(self.mark[1]) or self.record


_MOST_BYTES = 2**20
_PULSE = ("step", "time", "beats")  # change with every heartbeat, and are the end of a line
_PULSE_BEGINS = b', "step": '  # not inside a text, where quotes are escaped
_PHASES = frozenset(get_args(Phase))
_FOLLOWS = frozenset(get_args(Follows))
_HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


def now() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")


def line_of(record: RankRecord) -> bytes:
    """Return the record as one line, which fits into a slot of a board; a long error is cut."""
    fields = asdict(record)
    pulse = {name: fields.pop(name) for name in _PULSE}
    line = json.dumps(fields | pulse).encode()
    if len(line) <= SLOT_BYTES:
        return line
    assert record.error, "only an error is long"
    return line_of(replace(record, error=record.error[: len(record.error) // 2]))


def parse_record(line: bytes) -> RankRecord | None:
    """Return the record of a line; None if it is damaged."""
    try:
        record = RankRecord(**parse_json(line))
    except (ValueError, TypeError):
        return None
    return record if _is_sound(record) else None


class LineParser:
    """Parses lines that are read again and again; one of which only step, time and beats are new is not parsed."""

    def __init__(self) -> None:
        self._known: dict[bytes, RankRecord] = {}

    def seen(self, lines: Iterable[bytes], touches: int = 0) -> dict[int, Seen]:
        """Return the records by rank, without damaged ones."""
        known = self._known
        self._known = {}
        found: dict[int, Seen] = {}
        for line in lines:
            lasting = line.rpartition(_PULSE_BEGINS)[0]
            record = known.get(lasting) or parse_record(line)
            if record is not None:
                self._known[lasting] = record
                found[record.rank] = Seen(record, (touches, line))
        return found


class HostFile:
    """The records of a host's ranks, one per line. It is written in place: a network disk compares a file that is
    opened with the server's, but may show a file that replaces another one late."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._content = b""
        self._changed = 0
        self._touches = 0
        self._parser = LineParser()
        self._seen: dict[int, Seen] = {}

    def write(self, lines: Iterable[bytes]) -> None:
        """Write the records. On a full disk the old file is touched, which also counts as a heartbeat of all."""
        content = b"".join(line + b"\n" for line in lines)
        try:
            _write_in_place(self._path, content)
        except OSError:
            os.utime(self._path)

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)

    def read(self) -> dict[int, Seen]:
        """Return the records by rank. In place of a line that is damaged or half written, return the one before."""
        try:
            content, changed = _read_all(self._path)
        except FileNotFoundError:
            self._seen = {}
            return {}
        self._touches += content == self._content and changed != self._changed
        self._content = content
        self._changed = changed
        *lines, rest = content.split(b"\n")
        found = self._parser.seen(lines, self._touches)
        is_complete = len(found) == len(lines) and not rest
        self._seen = found if is_complete else self._seen | found
        return self._seen


def write_record(folder: Path, record: RankRecord) -> None:
    """Write the record of a host with a single rank."""
    HostFile(RunFolder(folder).host_records(record.rank)).write([line_of(record)])


def read_records(folder: Path) -> dict[int, Seen]:
    """Return the records of all ranks; missing ones are left out."""
    found: dict[int, Seen] = {}
    for path in RunFolder(folder).all_host_records():
        with suppress(OSError):
            found |= HostFile(path).read()
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


def _write_in_place(path: Path, content: bytes) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        if os.write(file, content) < len(content):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        os.ftruncate(file, len(content))
    finally:
        os.close(file)


def _read_all(path: Path) -> tuple[bytes, int]:
    """Return the content of a file, and the time of its last change."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(file, _MOST_BYTES), os.fstat(file).st_mtime_ns
    finally:
        os.close(file)


def _is_sound(record: RankRecord) -> bool:
    """True if every field has its type. The folder of a run may not be trustworthy, and fields of a record end up in
    commands on other hosts."""
    return (
        is_sound_process(record)
        and all(_is_number(number) for number in (record.rank, record.step, record.beats))
        and all(type(text) is str for text in (record.launch, record.key, record.time, record.during, record.error))
        and record.phase in _PHASES
        and record.follows in _FOLLOWS
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
