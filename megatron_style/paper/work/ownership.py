"""One `reproduce` per folder, and none of the processes that a killed one has left.

Every job has the folder in its environment, and what it starts inherits it. Who holds the folder's lock may therefore
end every other process that names the folder: the `reproduce` that started it is dead.
"""

from __future__ import annotations

import fcntl
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megatron_style.base.command import log
from megatron_style.base.errors import RunFailed, UserError

JOB_OF = "SHORTFORMER_REPRODUCTION"
_LOCK_FILE = "lock"
_GONE_SECONDS = 10.0


@contextmanager
def sole_owner(output: Path) -> Iterator[None]:
    """Own the folder: refuse to share it with a living `reproduce`, and end what a killed one has left."""
    output.mkdir(parents=True, exist_ok=True)
    with (output / _LOCK_FILE).open("w") as lock:  # jobs do not inherit it, so it is free when `reproduce` is dead
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"--output {output}: another `reproduce` uses it; wait, or choose another folder") from None
        end_orphans(output)
        yield


def job_environment(output: Path) -> dict[str, str]:
    """Return the variable that identifies the processes of a job."""
    return {JOB_OF: str(output.resolve())}


def end_orphans(output: Path) -> None:
    """Kill every process that names the folder. A killed training resumes from its last checkpoint, so that nothing is
    gained by waiting for it to stop."""
    ended: set[int] = set()
    until = time.monotonic() + _GONE_SECONDS
    while found := _kill_jobs(output):
        ended |= found
        if time.monotonic() > until:
            raise RunFailed(f"--output {output}: processes of a killed `reproduce` do not end: {_listed(found)}")
        time.sleep(0.05)
    if ended:
        log(f"ended the processes that a killed `reproduce` has left: {_listed(ended)}")


def _kill_jobs(output: Path) -> set[int]:
    """Kill what names the folder, and return the pids that were found; ended processes have no environment."""
    entries = {f"{name}={value}".encode() for name, value in job_environment(output).items()}
    found = set()
    for path in Path("/proc").glob("[0-9]*/environ"):
        pid = int(path.parent.name)
        with suppress(OSError):  # it has ended, or belongs to another user
            handle = os.pidfd_open(pid)  # of this very process: a later one with the same pid is not killed
            try:
                if pid != os.getpid() and entries & set(path.read_bytes().split(b"\0")):
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
                    found.add(pid)
            finally:
                os.close(handle)
    return found


def _listed(pids: set[int]) -> str:
    return ", ".join(map(str, sorted(pids)))
