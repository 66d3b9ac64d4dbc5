"""One run on a folder at a time. The lock of a run that was killed opens by itself."""

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
    """A file that names its owner. Of the same host the owner's pid and start tell whether it lives; on another host
    a lock that nobody touches for a minute, by our own clock, is abandoned."""

    def __init__(
        self,
        path: Path,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._path, self._clock, self._sleep = path, clock, sleep
        self._me = json.dumps(asdict(Owner(**vars(this_process()), since=now(), key=uuid.uuid4().hex)))
        self._made_folder = False

    def take(self) -> str | None:
        """Why not, in one line; None when it is ours now."""
        while True:
            refusal = self.clear()
            if refusal:
                return refusal
            if not self._path.parent.exists():
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._made_folder = True
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
        """Remove the lock of a dead owner; of a living one, say who it is."""
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
            return f"{self._path}: another run is just taking it; end it first, or choose another output.path"
        return self._remove(held)

    def refresh(self) -> str | None:
        """Show that the owner lives. Gives a reason to end when the lock is another's now."""
        held = self._read()
        if held == self._me:
            os.utime(self._path)
        owner = _owner_of(held) if held and held != self._me else None
        return f"the lock {self._path} is now that of pid {owner.pid} on {owner.host}" if owner else None

    def release(self) -> None:
        if self._read() == self._me:
            self._path.unlink(missing_ok=True)
        if self._made_folder:
            remove_if_empty(self._path.parent)

    def _stays_untouched(self, owner: Owner | None) -> bool:
        log(f"{self._path}: of {owner.host if owner else 'an unknown host'}; looking for a minute whether it lives")
        before, begin = self._touched(), self._clock()
        while self._clock() - begin < STALE_SECONDS:
            self._sleep(_LOOK_SECONDS)
            if self._touched() != before:
                return False
        return True

    def _touched(self) -> tuple[int, int] | None:
        """Opened, not only asked for: network disks look again then."""
        try:
            with self._path.open("rb") as file:
                stat = os.fstat(file.fileno())
                return stat.st_mtime_ns, stat.st_ino
        except FileNotFoundError:
            return None

    def _remove(self, held: str) -> str | None:
        """Moved first, and looked at again: another run may have removed it before us, and put its own there."""
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
    """Return who holds the lock, if the text says so: it may be a stranger's, or torn."""
    try:
        owner = Owner(**parse_json(text))
    except (ValueError, TypeError):
        return None
    return owner if is_sound_process(owner) and type(owner.since) is str else None
