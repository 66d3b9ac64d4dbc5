"""The runs of a table, trained: each is the ordinary `train` on an ordinary run file, and resumes by itself."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_style.base.command import log
from megatron_style.base.files import write_atomic
from megatron_style.config.run import RunConfig, save_run
from megatron_style.paper.experiment import Experiment
from megatron_style.paper.processes import Job, run_jobs
from megatron_style.paper.runs import ROOT, RunSpec
from megatron_style.paper.sharing import begins_like, checkpoint_for, take_over

ORIGIN = "origin.json"


def train_command(run: RunConfig, processes: int) -> tuple[str, ...]:
    words: tuple[str, ...] = (sys.executable, "-m")
    if processes > 1:
        launcher = shutil.which("deepspeed") or str(Path(sys.executable).with_name("deepspeed"))
        words = (launcher, "--num_gpus", str(processes), "--module")
    return (*words, "megatron_style.train", str(run_file(run)))


def run_file(run: RunConfig) -> Path:
    return run.output.path / "run.yaml"


def write_run_files(experiment: Experiment, specs: Sequence[RunSpec]) -> None:
    for spec in specs:
        run = experiment.config(spec)
        run.output.path.mkdir(parents=True, exist_ok=True)
        save_run(run, run_file(run))


def train_all(experiment: Experiment, specs: Sequence[RunSpec], *, at_once: int, threads: int) -> None:
    """What is finished is left alone. Runs that can begin where another's first stage ends wait for it."""
    todo = [spec for spec in specs if not experiment.is_finished(spec)]
    write_run_files(experiment, todo)
    donors = [experiment.config(spec) for spec in _possible_donors(experiment)]
    now, later = waves([experiment.config(spec) for spec in todo], donors)
    origin = {"commit": commit(), "cores": os.cpu_count(), "at_once": at_once, "threads": threads}
    for wave in (now, later):
        jobs = [_job(run, donors, experiment.scale.processes, origin) for run in wave]
        run_jobs(jobs, at_once=at_once, threads=threads)


def waves(runs: Sequence[RunConfig], donors: Sequence[RunConfig]) -> tuple[list[RunConfig], list[RunConfig]]:
    """Those to train now, long first stages first, and those that can begin with what these will have saved."""
    now: list[RunConfig] = []
    later: list[RunConfig] = []
    for run in sorted(runs, key=lambda run: run.stages[0].steps or 0, reverse=True):
        is_saved = any(checkpoint_for(run, donor) for donor in donors)
        waits = not is_saved and any(begins_like(run, other) for other in now)
        (later if waits else now).append(run)
    return now, later


def _possible_donors(experiment: Experiment) -> list[RunSpec]:
    specs = [spec for table in experiment.tables() for spec in table.needs()]
    return list(experiment.seeded(specs))


def _job(run: RunConfig, donors: Sequence[RunConfig], processes: int, origin: Mapping[str, object]) -> Job:
    folder = run.output.path

    def begin() -> None:
        if (found := take_over(run, donors)) is not None:
            log(f"{folder.name}: begins with {found.parents[1].name} at step {run.stages[0].steps}")
        write_atomic(folder / ORIGIN, json.dumps(origin) + "\n")

    output = folder / "train.out"
    return Job(f"train {folder.name}", train_command(run, processes), folder / "train.log", output, before=begin)


def commit() -> str | None:
    """Of the code, where it is a checkout; with a mark if files were changed since."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
