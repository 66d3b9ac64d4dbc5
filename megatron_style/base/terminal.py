"""A terminal whose last line may be a progress bar that other output does not tear."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from typing import Any, TextIO

_CLEAR = "\r\x1b[2K"
_USUAL_WIDTH = 80


class Terminal:
    """Standard error of a rank. Text is written above the bar; a line also clears the bar of another process."""

    def __init__(self, stream: TextIO, log: TextIO | None = None) -> None:
        """Write to `stream`; `log` receives the lines that the bar replaces."""
        self._stream = stream
        self._log = log
        self._bar = ""
        self._line_begins = True
        self._lock = threading.Lock()  # the heartbeat writes from a thread of its own

    def write(self, text: str) -> int:
        if not text:
            return 0
        with self._lock:
            clear = _CLEAR if self._line_begins else ""
            self._line_begins = text.endswith("\n")
            self._stream.write(clear + text + (self._bar if self._line_begins else ""))
        return len(text)

    def draw(self, bar: str) -> None:
        """Show the bar as the last line from now on; an empty one removes it."""
        with self._lock:
            if self._line_begins and (bar or self._bar):
                self._stream.write(_CLEAR + bar)
                self._stream.flush()
            self._bar = bar

    def keep(self, text: str) -> None:
        """Write to the log only. A full disk may end the log, but not the run."""
        with suppress(OSError, ValueError):
            if self._log is not None:
                self._log.write(text)

    @property
    def width(self) -> int:
        try:
            return os.get_terminal_size(self._stream.fileno()).columns or _USUAL_WIDTH
        except OSError:
            return _USUAL_WIDTH

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def has_bar(stream: TextIO) -> bool:
    """True if the stream is a terminal that can clear a line."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"
