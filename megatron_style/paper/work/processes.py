"""Runs commands as separate processes, a few at a time, and ends them with itself."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from megatron_style.base.command import log
from megatron_style.base.errors import RunFailed
from megatron_style.base.launches import ROOT
from megatron_style.data.preparation.workers import usable_cpus

_POLL_SECONDS = 0.1
_EXIT_TIMEOUT_SECONDS = 60.0  # for a training to save before it is killed


@dataclass(frozen=True)
class Job:
    title: str
    command: tuple[str, ...]
    log: Path  # its standard error is appended to it
    output: Path  # its standard output
    before: Callable[[], object] = field(default=lambda: None)
    after: Callable[[], object] = field(default=lambda: None)  # only if it has succeeded
    then: Callable[[], Sequence[Job]] = field(default=lambda: ())  # the jobs to run next, if it has succeeded


@dataclass(frozen=True)
class Workers:
    """How jobs are run."""

    at_once: int
    threads: int  # of each
    environment: Mapping[str, str] = field(default_factory=dict)  # in addition to this process's

    @classmethod
    def sharing_the_cores(cls, at_once: int, environment: Mapping[str, str]) -> Workers:
        """Return workers with OMP_NUM_THREADS threads, or an equal share of the cores. The variable is for machines
        that have other work: more threads than idle cores wait for one another."""
        given = os.environ.get("OMP_NUM_THREADS", "")
        threads = int(given) if given.isdigit() and int(given) else max(1, usable_cpus() // at_once)
        return cls(at_once, threads, environment)


def run_jobs(jobs: Sequence[Job], workers: Workers) -> None:
    """Run the jobs in their order. The first failure ends all of them; what they have saved is not lost."""
    waiting = list(jobs)
    running: dict[subprocess.Popen[bytes], Job] = {}
    begun = time.monotonic()
    started = 0
    with _sigterm_interrupts(), _ended_on_exit(running):
        while waiting or running:
            while waiting and len(running) < workers.at_once:
                job = waiting.pop(0)
                started += 1
                total = started + len(waiting)
                left = _time_left(begun, done=started - 1 - len(running), of=total)
                log(f"[{started}/{total}] {job.title}{left}")
                job.before()
                running[_start(job, workers)] = job
            time.sleep(_POLL_SECONDS)
            for process in [each for each in running if each.poll() is not None]:
                waiting[:0] = _finish(running.pop(process), process.returncode)


def _time_left(begun: float, *, done: int, of: int) -> str:
    """Return the estimated time left, if it is minutes: remaining jobs are assumed to take as long as the others."""
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
def _ended_on_exit(running: Collection[subprocess.Popen[bytes]]) -> Iterator[None]:
    """Terminate on exit what still runs, and kill it after a timeout, in which a training saves."""
    try:
        yield
    finally:
        for process in running:
            process.terminate()
        for process in running:
            with suppress(subprocess.TimeoutExpired):
                process.wait(_EXIT_TIMEOUT_SECONDS)
            process.kill()
            process.wait()


def _start(job: Job, workers: Workers) -> subprocess.Popen[bytes]:
    for file in (job.log, job.output):
        file.parent.mkdir(parents=True, exist_ok=True)
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    settings = {"OMP_NUM_THREADS": str(workers.threads), "PYTHONPATH": os.pathsep.join(paths)}
    environment = {**os.environ, **workers.environment, **settings}
    with job.log.open("ab") as errors, job.output.open("wb") as results:
        return subprocess.Popen(job.command, stdin=subprocess.DEVNULL, stdout=results, stderr=errors, env=environment)


def _finish(job: Job, code: int) -> Sequence[Job]:
    if code:
        lines = job.log.read_text(encoding="utf-8", errors="replace").split("\n")
        said = next((line for line in reversed(lines) if line.strip()), "nothing")
        raise RunFailed(f"{job.title}: exit code {code}, last line: {said} ({job.log}); start again to resume")
    job.after()
    return job.then()
