"""Who a process is, so that another one can tell whether it still lives."""

from __future__ import annotations

import os
import signal
import socket
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Process:
    host: str
    place: str  # where its pid means something: one boot of one machine, one namespace of pids
    pid: int
    started: int  # clock ticks after the boot: tells it from a later process that was given the same pid

    @property
    def is_local(self) -> bool:
        return (self.host, self.place) == (socket.gethostname(), _place())

    @property
    def is_gone(self) -> bool:
        """Known of processes of this host only; of others never."""
        return self.is_local and started_at(self.pid) != self.started

    def send(self, number: signal.Signals) -> None:
        """To this very process, or to nobody."""
        if self.is_local and not self.is_gone:
            try:
                os.kill(self.pid, number)
            except ProcessLookupError:
                return


def this_process() -> Process:
    return Process(socket.gethostname(), _place(), os.getpid(), started_at(os.getpid()))


def started_at(pid: int) -> int:
    """0 when there is no such process. One that has ended and only waits for its parent counts as gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return 0
    state, *fields = text.rpartition(")")[2].split()  # the name before it may hold anything
    return 0 if state in "ZX" else int(fields[18])


def _place() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""
