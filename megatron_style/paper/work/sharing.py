"""Trains a common beginning of runs once. A staged run whose first stage another run has trained, with the same
learning rates, optimizer, text and seed, begins with that run's checkpoint and its record up to there. Resuming is
bit-exact, so that the result is that of training from the first step."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from megatron_style.base.events import StageEvent, TrainEvent, line_of, read_events
from megatron_style.base.files import atomic_folder, write_atomic
from megatron_style.base.run_folder import LATEST, RunFolder
from megatron_style.config.run import RunConfig

TAKEN = "taken_over.json"
_CARRIED = TrainEvent | StageEvent  # validations are by the protocol of the run's own last stage


def begins_like(taker: RunConfig, donor: RunConfig) -> bool:
    """True if the donor passes through the state in which the taker's first stage ends."""
    if len(taker.stages) < 2 or taker.output.path == donor.output.path:
        return False
    first = taker.stages[0]
    donated = donor.stages[0]
    if first.steps is None or donated.steps is None or first.steps > donated.steps:
        return False
    is_kept = taker.output.keep_every is not None and first.steps % taker.output.keep_every == 0
    same_stage = first == donated.model_copy(update={"steps": first.steps})
    return is_kept and same_stage and _total_steps(taker) == _total_steps(donor) and _rest(taker) == _rest(donor)


def checkpoint_for(taker: RunConfig, donor: RunConfig) -> Path | None:
    """Return the donor's checkpoint at the end of the taker's first stage; None if there is none."""
    steps = taker.stages[0].steps
    if steps is None or not begins_like(taker, donor):
        return None
    folder = RunFolder(donor.output.path).checkpoint(steps)
    return folder if (folder / "manifest.json").is_file() else None


def take_over(taker: RunConfig, donors: Iterable[RunConfig]) -> Path | None:
    """Copy the state of a donor into a run that has not begun yet, and return the checkpoint; None without a donor."""
    mine = RunFolder(taker.output.path)
    found = next((folder for donor in donors if (folder := checkpoint_for(taker, donor))), None)
    if found is None or mine.checkpoints.exists():
        return None
    donor = found.parents[1]
    steps = taker.stages[0].steps
    assert steps is not None
    events = read_events(RunFolder(donor).metrics)
    carried = (event for event in events if isinstance(event, _CARRIED) and event.step <= steps)
    mine.path.mkdir(parents=True, exist_ok=True)
    write_atomic(mine.metrics, "".join(f"{line_of(event)}\n" for event in carried))
    write_atomic(mine.path / TAKEN, json.dumps({"run": donor.name, "step": steps}) + "\n")
    with atomic_folder(mine.checkpoints) as folder:  # last: its existence means that the run has begun
        shutil.copytree(found, folder / found.name, copy_function=_link)
        (folder / LATEST).write_text(found.name, encoding="utf-8")
    return found


def _link(source: str, target: str) -> None:
    """Link instead of copying: checkpoints are never changed, so one copy on the disk is enough."""
    try:
        os.link(source, target)
    except OSError:  # another disk, or one without links
        shutil.copy2(source, target)


def _total_steps(run: RunConfig) -> int | None:
    """Return the number of steps, which the learning rate is a function of."""
    steps = [stage.steps for stage in run.stages]
    return None if None in steps else sum(step for step in steps if step is not None)


def _rest(run: RunConfig) -> RunConfig:
    """Return the settings that must be equal in addition to the stages: all but the output."""
    return run.model_copy(update={"stages": (), "output": None})
