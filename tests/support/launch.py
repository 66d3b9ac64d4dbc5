"""Commands in processes of their own, alone or under a launcher."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def launch(command: str, *argv: object, processes: int | None = None) -> subprocess.CompletedProcess[str]:
    """`python -m megatron_style.COMMAND`, or under the deepspeed launcher where a number of processes is given."""
    words: list[object] = [sys.executable]
    if processes is not None:
        deepspeed = Path(sys.executable).with_name("deepspeed")
        words = [deepspeed, "--num_accelerators", processes, "--master_port", free_port()]
    words += ["--module" if processes else "-m", f"megatron_style.{command}", *argv]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"  # the launcher starts `python`
    return subprocess.run(list(map(str, words)), cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
    return port
