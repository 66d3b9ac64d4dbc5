"""Hold variables on a host for the ranks that start there: one file each, until standard input is closed.

python -m megatron_style.hosts.holder FOLDER <<<'{"NAME": "value"}'

The connection to the launcher is standard input, so that nothing is left when the launcher is killed.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

HELD = "held"


def hold(folder: Path, variables: Mapping[str, str]) -> None:
    folder.mkdir(mode=0o700)  # an error if it exists: another user would decide what the ranks read
    try:
        for name, value in variables.items():
            file = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode=0o600)
            with os.fdopen(file, "w", encoding="utf-8") as opened:
                opened.write(value)
        sys.stdout.write(f"{HELD}\n")
        sys.stdout.flush()
        sys.stdin.read()
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(1))
    hold(Path(sys.argv[1]), json.loads(sys.stdin.readline()))
