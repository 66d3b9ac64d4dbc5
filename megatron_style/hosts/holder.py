"""Hold variables on a host for the ranks that start there: one file each, until standard input is closed.

python -m megatron_style.hosts.holder FOLDER <<<'{"NAME": "value"}'

The connection to the launcher is standard input, so that nothing is left when the launcher is killed. What is left when
a holder itself is killed is removed by the next one on its host: a holder locks its folder as long as it lives.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

HELD = "held"
NAME = "megatron_style-"  # with which the folders of holders begin
_YOUNG_SECONDS = 60.0  # a folder may not be locked yet


def hold(folder: Path, variables: Mapping[str, str]) -> None:
    remove_left_over(folder.parent)
    folder.mkdir(mode=0o700)  # an error if it exists: another user would decide what the ranks read
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for name, value in variables.items():
            file = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode=0o600)
            with os.fdopen(file, "w", encoding="utf-8") as opened:
                opened.write(value)
        sys.stdout.write(f"{HELD}\n")
        sys.stdout.flush()
        sys.stdin.read()
    finally:
        shutil.rmtree(folder)
        os.close(lock)


def remove_left_over(place: Path) -> None:
    """Remove this user's folders whose holders were killed."""
    for folder in place.glob(f"{NAME}*"):
        with suppress(OSError):  # it is another user's, or its holder removes it just now
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                about = os.fstat(lock)
                if about.st_uid == os.getuid() and time.time() - about.st_mtime > _YOUNG_SECONDS:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # an error while the holder lives
                    shutil.rmtree(folder)
            finally:
                os.close(lock)


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(1))
    hold(Path(sys.argv[1]), json.loads(sys.stdin.readline()))
