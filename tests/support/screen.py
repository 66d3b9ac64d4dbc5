"""What somebody sees who looks at a terminal: just as much of one as a progress bar needs."""

from __future__ import annotations

import re


class Screen:
    def __init__(self) -> None:
        self.lines: list[str] = []  # that will not change any more
        self.last = ""
        self.seen: list[str] = []  # every state of the last line that was there for a while
        self._column = 0

    def feed(self, text: str) -> None:
        for part in re.findall(r"\x1b\[2K|\x1b.|\r\n|\r|\n|[^\x1b\r\n]+", text):
            if part in ("\n", "\r\n"):
                self.lines.append(self.last)
                self.last, self._column = "", 0
            elif part == "\r":
                self._column = 0
            elif part == "\x1b[2K":
                self.seen.append(self.last)
                self.last = " " * self._column
            else:
                assert not part.startswith("\x1b"), f"an escape that this screen does not know: {part!r}"
                self.last = self.last[: self._column] + part + self.last[self._column + len(part) :]
                self._column += len(part)
