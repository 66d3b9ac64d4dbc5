"""Kill runs at random moments, and damage their checkpoints before they are resumed."""

from __future__ import annotations

import multiprocessing
import os
import random
import re
import shutil
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from megatron_style.checkpoint.manifest import FILE, Damaged, check_file, read_manifest
from megatron_style.config.run import RunConfig
from megatron_style.parallel.local_ranks import run_ranks
from megatron_style.supervision.process import started_at
from megatron_style.train import train
from tests.support.resuming import age_event_files, damage

_LEAVE_SECONDS = 60.0  # for the other ranks, when one was killed


@dataclass(frozen=True)
class Killed:
    landed: bool  # before the run had finished
    log: str

    @property
    def resumed_at(self) -> int | None:
        """Return the step at which it resumed, if it got that far."""
        found = re.search(r"resuming at step (\d+) ", self.log)
        return int(found[1]) if found else None


def run_and_kill(run: RunConfig, world: int, place: Path, rng: random.Random, seconds: float) -> Killed:
    """Start the run, and kill one rank or all: at a random moment of an undisturbed run's `seconds`, or in a save."""
    age_event_files(run)
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    driver = multiprocessing.get_context("fork").Process(target=_killable, args=(run, world, place))
    driver.start()
    if rng.random() < 0.5:
        driver.join(rng.uniform(0.1, 1.0) * seconds)
    else:
        _wait_for_save(driver, run.output.path / "checkpoints", rng)
    whom = rng.choice([*range(world), None])
    if driver.is_alive() and whom is not None and (place / str(whom)).exists():
        with suppress(ProcessLookupError):  # it may have ended just now
            os.kill(int((place / str(whom)).read_text()), signal.SIGKILL)
        driver.join(_LEAVE_SECONDS)
    if driver.is_alive():
        os.killpg(driver.pid or 0, signal.SIGKILL)
    driver.join()
    _wait_for_ranks(place)
    finished = (run.output.path / "model").exists()
    return Killed(driver.exitcode != 0 and not finished, (place / "log").read_text())


def _wait_for_save(driver: multiprocessing.process.BaseProcess, checkpoints: Path, rng: random.Random) -> None:
    """Return a few milliseconds after one of the next saves has begun."""
    seen: set[str] = set()
    wanted = rng.randrange(1, 5)
    while driver.is_alive() and len(seen) < wanted:
        seen |= {path.name for path in checkpoints.glob("*.partial")}
        time.sleep(0.0005)
    driver.join(rng.uniform(0, 0.05))


def _wait_for_ranks(place: Path) -> None:
    """Wait until no rank is left: on a busy machine a killed process takes a while to end, and holds the lock."""
    until = time.monotonic() + _LEAVE_SECONDS
    for file in place.glob("[0-9]*"):
        while started_at(int(file.read_text())):
            assert time.monotonic() < until, f"rank {file.name} does not end"
            time.sleep(0.01)


def _killable(run: RunConfig, world: int, place: Path) -> None:
    os.setpgid(0, 0)
    os.dup2(os.open(place / "log", os.O_WRONLY | os.O_CREAT), 2)
    run_ranks(world, _write_pid_and_train, run, place)


def _write_pid_and_train(run: RunConfig, place: Path) -> None:
    (place / os.environ["RANK"]).write_text(str(os.getpid()))
    train(run)


def complete_steps(checkpoints: Path) -> list[int]:
    """Return the steps of the checkpoints that are complete and of the step in their name, the newest first."""
    steps = []
    for folder in checkpoints.glob("global_step*"):
        with suppress(Damaged):
            manifest = read_manifest(folder)
            for name, (size, digest) in manifest.files.items():
                check_file(folder, name, size, digest)
            if folder.name == f"global_step{manifest.step}":
                steps.append(manifest.step)
    return sorted(steps, reverse=True)


def damage_newest(how: str, checkpoints: Path, rng: random.Random) -> bool:
    """Do one kind of damage and return True, unless that would leave no complete checkpoint."""
    steps = complete_steps(checkpoints)
    if len(steps) <= SPOILT[how]:
        return False
    DAMAGES[how](checkpoints, [checkpoints / f"global_step{step}" for step in steps], rng)
    return True


def _flip(_: Path, complete: list[Path], rng: random.Random) -> None:
    damage(rng.choice(sorted(complete[0].iterdir())), "flipped")


def _truncate(_: Path, complete: list[Path], rng: random.Random) -> None:
    damage(rng.choice(sorted(complete[0].iterdir())), "truncated")


def _delete_manifest(_: Path, complete: list[Path], rng: random.Random) -> None:
    (complete[0] / FILE).unlink()


def _leave_partial(checkpoints: Path, complete: list[Path], rng: random.Random) -> None:
    """Leave a checkpoint that was never renamed, as a killed save does: it must not be taken for complete."""
    step = int(complete[0].name.removeprefix("global_step"))
    aside = checkpoints / f"global_step{step + rng.randrange(2)}.partial"
    shutil.rmtree(aside, ignore_errors=True)
    shutil.copytree(complete[0], aside)


def _remove_latest(checkpoints: Path, complete: list[Path], rng: random.Random) -> None:
    (checkpoints / "latest").unlink(missing_ok=True)


def _exchange(checkpoints: Path, complete: list[Path], rng: random.Random) -> None:
    newest, before = complete[:2]
    aside = checkpoints / "aside"
    newest.rename(aside)
    before.rename(newest)
    aside.rename(before)


DAMAGES: Mapping[str, Callable[[Path, list[Path], random.Random], None]] = {
    "flipped": _flip,
    "truncated": _truncate,
    "no manifest": _delete_manifest,
    "leftover": _leave_partial,
    "no latest": _remove_latest,
    "exchanged": _exchange,
}
SPOILT = {"flipped": 1, "truncated": 1, "no manifest": 1, "leftover": 0, "no latest": 0, "exchanged": 2}  # checkpoints
