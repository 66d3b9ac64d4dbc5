"""Commands as processes of their own, some at a time."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from megatron_style.base.command import log
from megatron_style.base.errors import RunFailed
from megatron_style.paper.runs import ROOT

_LOOK_SECONDS, _LEAVE_SECONDS = 0.1, 60.0


@dataclass(frozen=True)
class Job:
    title: str
    command: tuple[str, ...]
    log: Path  # what it says on its standard error is added to it
    output: Path  # its standard output
    before: Callable[[], object] = field(default=lambda: None)
    after: Callable[[], object] = field(default=lambda: None)  # only when it has ended well


def run_jobs(jobs: Sequence[Job], *, at_once: int, threads: int) -> None:
    """In their order. The first that fails ends all: what they have saved is not lost."""
    waiting, running = list(enumerate(jobs, start=1)), dict[subprocess.Popen[bytes], Job]()
    begun = time.monotonic()
    with _sigterm_interrupts(), _ended_at_last(running):
        while waiting or running:
            while waiting and len(running) < at_once:
                number, job = waiting.pop(0)
                left = _time_left(begun, done=number - 1 - len(running), of=len(jobs))
                log(f"[{number}/{len(jobs)}] {job.title}{left}")
                job.before()
                running[_start(job, threads)] = job
            time.sleep(_LOOK_SECONDS)
            for process in [each for each in running if each.poll() is not None]:
                _finish(running.pop(process), process.returncode)


def _time_left(begun: float, *, done: int, of: int) -> str:
    """If the rest takes as long as what is done; the minutes of a table, not the seconds of a test."""
    minutes = (time.monotonic() - begun) / 60 * (of - done) / done if done else 0
    return f", about {minutes:.0f} min left" if minutes >= 2 else ""


@contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _ended_at_last(running: Collection[subprocess.Popen[bytes]]) -> Iterator[None]:
    """Asked to leave, a training saves first."""
    try:
        yield
    finally:
        for process in running:
            process.terminate()
        for process in running:
            with suppress(subprocess.TimeoutExpired):
                process.wait(_LEAVE_SECONDS)
            process.kill()
            process.wait()


def _start(job: Job, threads: int) -> subprocess.Popen[bytes]:
    for file in (job.log, job.output):
        file.parent.mkdir(parents=True, exist_ok=True)
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": os.pathsep.join(paths)}
    with job.log.open("ab") as errors, job.output.open("wb") as results:
        return subprocess.Popen(job.command, stdin=subprocess.DEVNULL, stdout=results, stderr=errors, env=environment)


def _finish(job: Job, code: int) -> None:
    if code:
        lines = job.log.read_text(encoding="utf-8", errors="replace").split("\n")
        said = next((line for line in reversed(lines) if line.strip()), "nothing")
        raise RunFailed(f"{job.title}: ended with exit code {code}, and said: {said} ({job.log}); start again to go on")
    job.after()
