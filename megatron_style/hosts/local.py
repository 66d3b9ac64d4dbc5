"""Start the ranks of this host, and end all when one fails.

python -m megatron_style.hosts.local 2 megatron_style.train RUN.yaml

DeepSpeed's launcher does the same for one host, but imports torch and DeepSpeed twice before the ranks do, which takes
seconds. Signals are the matter of `supervision/launch.py`, which starts this process in a session of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence

from megatron_style.base.launchers import DEEPSPEED, STARTED_HERE

_LOOK_SECONDS = 0.05
_END_SECONDS = 30.0  # for the other ranks to end by themselves; as long as DeepSpeed's launcher waits


def main() -> None:
    processes, *module = sys.argv[1:]
    world = int(processes)
    sys.exit(exit_code([start(module, rank, world) for rank in range(world)]))


def start(module: Sequence[str], rank: int, world: int) -> subprocess.Popen[bytes]:
    place = {DEEPSPEED.rank: rank, DEEPSPEED.local_rank: rank, DEEPSPEED.world: world, DEEPSPEED.hosts: 1}
    variables = {name: str(value) for name, value in place.items()}
    environment = os.environ | {"MASTER_ADDR": "127.0.0.1", STARTED_HERE: "1"} | variables
    return subprocess.Popen([sys.executable, "-u", "-m", *module], env=environment)


def exit_code(ranks: Sequence[subprocess.Popen[bytes]]) -> int:
    """Wait for all ranks. Return 0, or the code of the first that failed; then the others are ended."""
    running = list(ranks)
    while running:
        time.sleep(_LOOK_SECONDS)
        failed = [rank.returncode for rank in running if rank.poll()]
        running = [rank for rank in running if rank.returncode is None]
        if failed:
            end(running)
            return failed[0] if failed[0] > 0 else 128 - failed[0]  # as shells say that a signal ended it
    return 0


def end(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    until = time.monotonic() + _END_SECONDS
    for rank in ranks:
        rank.terminate()
    for rank in ranks:
        try:
            rank.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            rank.kill()
            rank.wait()


if __name__ == "__main__":
    main()
