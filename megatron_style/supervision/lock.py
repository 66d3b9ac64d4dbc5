"""Allow one run per folder at a time. The lock of a run that was killed is released by the next one."""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_style.base.command import log
from megatron_style.base.json_text import parse_json
from megatron_style.supervision.process import Process, this_process
from megatron_style.supervision.record import is_sound_process, now

STALE_SECONDS = 60.0  # a living owner touches its lock every few seconds
_LOOK_SECONDS = 2.0


@dataclass(frozen=True)
class Owner(Process):
    since: str
    key: str = ""  # of this one lock


class FolderLock:
    """A file that names its owner. On the same host, the owner's pid and start time say whether it is alive; on another
    host, a lock that is not touched for a minute, by our own clock, is abandoned."""

    def __init__(
        self,
        path: Path,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._path = path
        self._clock = clock
        self._sleep = sleep
        self._me = json.dumps(asdict(Owner(**vars(this_process()), since=now(), key=uuid.uuid4().hex)))
        self.made: list[Path] = []  # folders that did not exist, the inner ones first

    def take(self) -> str | None:
        """Take the lock. Return why that is not possible, in one line, or None on success."""
        while True:
            refusal = self.clear()
            if refusal:
                return refusal
            self.made = self.made or [folder for folder in self._path.parents if not folder.exists()]
            self._path.parent.mkdir(parents=True, exist_ok=True)
            try:
                self._create()
                return None
            except FileExistsError:  # someone was quicker
                continue

    def _create(self) -> None:
        with self._path.open("x", encoding="utf-8") as file:
            try:
                file.write(self._me)
                file.flush()
            except OSError:  # a full disk
                self._path.unlink()
                raise

    def clear(self) -> str | None:
        """Remove the lock of a dead owner. If the owner is alive, return a line that names it."""
        held = self._read()
        if held is None:
            return None
        owner = _owner_of(held)
        if owner and not owner.is_gone and (owner.is_local or not self._stays_untouched(owner)):
            return (
                f"{self._path.parent}: another run is at work there: pid {owner.pid} on {owner.host}, "
                f"since {owner.since}; end it first, or choose another output.path"
            )
        if owner is None and not self._stays_untouched(None):
            return f"{self._path}: another run is taking this lock; end it first, or choose another output.path"
        return self._remove(held)

    def refresh(self) -> str | None:
        """Show that the owner is alive. Return a reason to end if another process holds the lock now."""
        held = self._read()
        if held == self._me:
            os.utime(self._path)
        owner = _owner_of(held) if held and held != self._me else None
        return f"{self._path}: the lock is now held by pid {owner.pid} on {owner.host}" if owner else None

    def release(self) -> None:
        if self._read() == self._me:
            self._path.unlink(missing_ok=True)
        for folder in self.made:
            remove_if_empty(folder)

    def _stays_untouched(self, owner: Owner | None) -> bool:
        host = owner.host if owner else "an unknown host"
        log(f"{self._path}: held by a process on {host}; waiting a minute to see whether it is alive")
        before = self._touched()
        begin = self._clock()
        while self._clock() - begin < STALE_SECONDS:
            self._sleep(_LOOK_SECONDS)
            if self._touched() != before:
                return False
        return True

    def _touched(self) -> tuple[int, int] | None:
        """Return when the lock was touched. The file is opened, because network disks refresh its attributes then."""
        try:
            with self._path.open("rb") as file:
                stat = os.fstat(file.fileno())
                return stat.st_mtime_ns, stat.st_ino
        except FileNotFoundError:
            return None

    def _remove(self, held: str) -> str | None:
        """Rename the lock, then compare: another run may have removed it before us and created its own."""
        aside = self._path.with_name(f"{self._path.name}.{os.getpid()}.old")
        try:
            self._path.rename(aside)
        except FileNotFoundError:
            return None
        if aside.read_text(encoding="utf-8", errors="replace") == held:
            aside.unlink()
            return None
        aside.rename(self._path)
        return self.clear()

    def _read(self) -> str | None:
        try:
            return self._path.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return None


def remove_if_empty(folder: Path) -> None:
    try:
        folder.rmdir()
    except OSError:
        return


def _owner_of(text: str) -> Owner | None:
    """Return the owner that a lock names; None if the file is truncated or from something else."""
    try:
        owner = Owner(**parse_json(text))
    except (ValueError, TypeError):
        return None
    return owner if is_sound_process(owner) and type(owner.since) is str else None
