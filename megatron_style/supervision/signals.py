"""The signals that ask a process to stop."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

from megatron_style.base.command import EXIT_STOPPED, log

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)


class StopSignals:
    """Notes that the process was asked to stop, and how often by Ctrl-C: the second one asks it to end at once.

    A thread calls `react` after each signal: the main thread may wait in a collective, where no Python handler runs."""

    def __init__(self, react: Callable[[], None] = lambda: None) -> None:
        self.asked = False
        self.interrupts = 0
        self.react = react
        wanted = [number for number in _SIGNALS if not _is_left_out(number)]
        self._before = {number: signal.signal(number, self._note) for number in wanted}
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._fd_before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._listen, name="signals", daemon=True).start()

    @property
    def ends_at_once(self) -> bool:
        return self.interrupts > 1

    def close(self) -> None:
        """Restore the previous handlers."""
        signal.set_wakeup_fd(self._fd_before)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._writer.close()

    def _note(self, number: int, frame: FrameType | None) -> None:
        """Note the request at once if the main thread is free. Only the thread counts interrupts."""
        del number, frame
        self.asked = True

    def _listen(self) -> None:
        while numbers := self._reader.recv(1):
            if numbers[0] in self._before:
                self.asked = True
                self.interrupts += numbers[0] == signal.SIGINT
                self.react()
        self._reader.close()


def leave_early() -> NoReturn:
    """Leave before the run has begun: it has nothing to save."""
    if os.environ.get("RANK", "0") == "0":
        log("stopped before the run began; nothing was trained")
    os._exit(EXIT_STOPPED)


def _is_left_out(number: signal.Signals) -> bool:
    """True for SIGHUP under `nohup`, whose purpose is that the run outlives its terminal."""
    return number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN
