"""The foundation of every other package; it imports none of them, and no torch.

errors: the exceptions, and text that is safe to print. command: flags, exit codes, results, findings and logs. files:
atomic files and folders, full disks. run_folder: the names of a run's files. model_files: those of a model's. events:
the lines of `metrics.jsonl`. launches: the starts of a run. json_text: parsing of untrusted JSON. launchers: the
environment variables of each launcher. terminal: a progress bar that other output does not tear. units: formatting of
amounts. cpu: what this machine's CPU can do. Read errors and command first.
"""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import NoReturn


def leave_at_ctrl_c() -> None:
    """End the process at once at Ctrl-C, without a traceback: the first thing that a command does, before its imports,
    which take seconds and may lose an exception. Under nohup or in the background the signal stays ignored."""
    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)


def raise_at_ctrl_c() -> None:
    """Raise KeyboardInterrupt at Ctrl-C again, after the imports."""
    if signal.getsignal(signal.SIGINT) == _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    del number, frame
    os.write(2, b"interrupted\n")
    os._exit(130)
