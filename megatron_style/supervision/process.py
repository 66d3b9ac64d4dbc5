"""The identity of a process, by which another one can tell whether it is still alive."""

from __future__ import annotations

import os
import signal
import socket
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Process:
    host: str
    place: str  # where its pid is valid: one boot of one machine, one pid namespace
    pid: int
    started: int  # clock ticks after the boot: distinguishes it from a later process with the same pid

    @property
    def is_local(self) -> bool:
        return self.host == socket.gethostname() and self.place == _place()  # of most ranks the first is enough

    @property
    def is_gone(self) -> bool:
        """True if the process has ended. Always False for processes of other hosts, where that is unknown."""
        return self.is_local and started_at(self.pid) != self.started

    def send(self, number: signal.Signals) -> None:
        """Send a signal to this very process, never to a later one with the same pid."""
        if self.is_local and not self.is_gone:
            try:
                os.kill(self.pid, number)
            except ProcessLookupError:
                return


def this_process() -> Process:
    return Process(socket.gethostname(), _place(), os.getpid(), started_at(os.getpid()))


def started_at(pid: int) -> int:
    """Return the start time in clock ticks after the boot; 0 if there is no such process, or only a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return 0
    state, *fields = text.rpartition(")")[2].split()  # the name before it may contain spaces and parentheses
    return 0 if state in "ZX" else int(fields[18])


def _place() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""
