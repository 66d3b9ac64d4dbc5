"""Copy the standard error of a rank to `logs/rank_00003.log`, including the traceback it ends with."""

from __future__ import annotations

import faulthandler
import logging
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO, cast

from megatron_style.base.errors import OnlyChecked, Stopped, UserError
from megatron_style.base.run_folder import RunFolder
from megatron_style.base.terminal import Terminal, has_bar
from megatron_style.supervision.record import now


class _Both:
    """Standard error and a copy of it. A full disk must not silence the console."""

    def __init__(self, console: TextIO | Terminal, copy: TextIO) -> None:
        self._console = console
        self._copy = copy

    def write(self, text: str) -> int:
        with suppress(OSError, ValueError):
            self._copy.write(text)
        return self._console.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._console, name)


@contextmanager
def rank_log(folder: Path, rank: int, launch: str) -> Iterator[Terminal | None]:
    """Copy standard error to the log of this rank. Yield the terminal, if it can show a progress bar."""
    console = sys.stderr
    with RunFolder(folder).log(rank).open("a", encoding="utf-8", buffering=1) as copy:
        copy.write(f"== launch {launch} begins: {now()}\n")
        terminal = Terminal(console, log=copy) if has_bar(console) else None
        sys.stderr = cast(TextIO, _Both(terminal or console, copy))
        _redirect_deepspeed(sys.stderr)
        faulthandler.enable(copy)
        try:
            yield terminal
        except (OnlyChecked, Stopped, UserError) as reason:
            copy.write(f"{reason}\n")
            raise
        except BaseException:
            copy.write(traceback.format_exc())
            raise
        finally:
            faulthandler.disable()
            sys.stderr = console
            _redirect_deepspeed(console)


def _redirect_deepspeed(stream: TextIO) -> None:
    for handler in logging.getLogger("DeepSpeed").handlers:
        if isinstance(handler, logging.StreamHandler):
            handler.setStream(stream)
