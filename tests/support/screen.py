"""A minimal terminal emulator, which knows what a progress bar needs."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
from collections.abc import Sequence

from tests.support.launch import ROOT, plain_environment


class Screen:
    def __init__(self) -> None:
        self.lines: list[str] = []  # those that can no longer change
        self.last = ""
        self.seen: list[str] = []  # the states of the last line before it was erased
        self._column = 0

    def feed(self, text: str) -> None:
        for part in re.findall(r"\x1b\[2K|\x1b.|\r\n|\r|\n|[^\x1b\r\n]+", text):
            if part in ("\n", "\r\n"):
                self.lines.append(self.last)
                self.last = ""
                self._column = 0
            elif part == "\r":
                self._column = 0
            elif part == "\x1b[2K":
                self.seen.append(self.last)
                self.last = " " * self._column
            else:
                assert not part.startswith("\x1b"), f"an escape that this screen does not know: {part!r}"
                self.last = self.last[: self._column] + part + self.last[self._column + len(part) :]
                self._column += len(part)


def on_a_terminal(words: Sequence[object], columns: int) -> str:
    """Run a command in its own terminal and return everything it writes."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    command = list(map(str, words))
    environment = plain_environment(TERM="xterm")
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    written = b""
    try:
        while part := os.read(ours, 65536):
            written += part
    except OSError:  # Linux raises this when the other end is closed
        pass
    os.close(ours)
    assert process.wait() == 0, written.decode()
    return written.decode()
