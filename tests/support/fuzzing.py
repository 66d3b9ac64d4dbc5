"""Run the trials of a fuzz target in a separate process: a hang, a crash or a memory bomb ends only that process."""

from __future__ import annotations

import os
import resource
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

from tests.support.fuzz_targets import TARGETS, Target, attempt

HANG_SECONDS = 10.0
READY_SECONDS = 300.0  # to write the sound files, for which some targets train a model
MOST_GROWTH = 2**30
LIMIT_GROWTH = 8 * 2**30  # of the address space: larger allocations fail before the machine suffers


@dataclass
class Found:
    """The outcomes of the trials of one target."""

    trials: int = 0
    reads: int = 0
    refusals: int = 0
    failures: dict[int, str] = field(default_factory=dict)  # by seed

    def add(self, seed: int, outcome: str, detail: str) -> None:
        self.trials += 1
        match outcome:
            case "read":
                self.reads += 1
            case "refused":
                self.refusals += 1
            case _:
                self.failures[seed] = detail


def fuzz(name: str, *, first: int = 0, trials: int | None = None, seconds: float | None = None) -> Found:
    """Try seeds from the first on: a number of them, or for some time. A process that fails is replaced."""
    found = Found()
    last = None if trials is None else first + trials
    deadline = None if seconds is None else time.monotonic() + seconds
    while first + found.trials != last and (deadline is None or time.monotonic() < deadline or not found.trials):
        for seed, outcome, detail in _outcomes(name, first + found.trials, last, deadline):
            found.add(seed, outcome, detail)
    return found


def _outcomes(name: str, first: int, last: int | None, deadline: float | None) -> Iterator[tuple[int, str, str]]:
    """Yield seed, outcome and detail of each trial, until the process is done or had to be ended."""
    context = get_context("fork")
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(writer, name, first, last, deadline))
    process.start()
    writer.close()
    patience = READY_SECONDS
    seed = None
    try:
        while reader.poll(patience):
            seed, outcome, detail = reader.recv()
            patience = HANG_SECONDS
            if outcome == "unready":
                raise RuntimeError(f"{name}: sound files could not be made and read\n{detail}")
            if outcome != "begins":
                yield seed, outcome, detail
                seed = None
        yield first if seed is None else seed, "failed", f"no answer within {patience:.0f} s"
    except EOFError:
        process.join()
        if process.exitcode:
            yield first if seed is None else seed, "failed", f"the process ended with exit code {process.exitcode}"
    finally:
        process.kill()
        process.join()
        reader.close()


def _child(pipe: Connection, name: str, first: int, last: int | None, deadline: float | None) -> None:
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "files"
        folder.mkdir()
        try:
            target = TARGETS[name](folder)
            for file in {file.name: file for file in target.files}.values():
                target.read(file)  # this also triggers late imports
        except BaseException:
            pipe.send((first, "unready", traceback.format_exc()))
            return
        _try_seeds(pipe, target, first, last, deadline)


def _try_seeds(pipe: Connection, target: Target, first: int, last: int | None, deadline: float | None) -> None:
    _limit_memory()
    before = _peak_bytes()
    for seed in count(first):
        pipe.send((seed, "begins", ""))
        outcome, detail = _try(target, seed)
        grown = _peak_bytes() - before
        if grown > MOST_GROWTH:
            outcome = "failed"
            detail = f"took {grown / 2**30:.1f} GiB of memory\n{detail}"
        pipe.send((seed, outcome, detail))
        is_last = seed + 1 == last or (deadline is not None and time.monotonic() >= deadline)
        if grown > MOST_GROWTH or is_last:
            return


def _try(target: Target, seed: int) -> tuple[str, str]:
    try:
        refusal = attempt(target, seed)
    except BaseException:
        return "failed", traceback.format_exc()
    return ("read", "") if refusal is None else ("refused", refusal)


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + LIMIT_GROWTH
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
