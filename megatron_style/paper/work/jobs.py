"""The work of an experiment: trainings and evaluations, as ordinary commands.

Trainings are `train` on ordinary run files, and resume by themselves. A model is evaluated as soon as it is trained,
so that an interrupted experiment has complete rows. What `evaluate --json` prints is kept with digests of its model and
text, so that no evaluation runs twice.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from megatron_style.base.command import log
from megatron_style.base.errors import UserError
from megatron_style.base.files import write_atomic
from megatron_style.base.launches import commit
from megatron_style.base.run_folder import RunFolder
from megatron_style.config.run import RunConfig
from megatron_style.config.run_file import save_run
from megatron_style.data.preparation.workers import usable_cpus
from megatron_style.paper.corpus import write_held_out
from megatron_style.paper.experiment import Experiment, write_record
from megatron_style.paper.measures import Evaluation, Table
from megatron_style.paper.runs import RunSpec
from megatron_style.paper.scale import ExperimentScale
from megatron_style.paper.tables import FIRST
from megatron_style.paper.work.evaluations import evaluation_jobs
from megatron_style.paper.work.ownership import job_environment
from megatron_style.paper.work.processes import Job, Workers, run_jobs
from megatron_style.paper.work.records import forget_records, is_complete, take_records
from megatron_style.paper.work.sharing import begins_like, checkpoint_for, take_over

ORIGIN = "origin.json"


def jobs_at_once(wanted: int | None, scale: ExperimentScale, *, has_gpus: bool) -> int:
    """Return the number of simultaneous runs on this machine, or refuse a scale that it cannot run."""
    if scale.processes > 1 and not has_gpus:
        raise UserError(
            f"--scale {scale.name}: needs {scale.processes} GPUs, and there are none here; "
            f"--emit prints the commands for a machine that has them"
        )
    if scale.processes > 1 and wanted not in (None, 1):
        raise UserError(f"--jobs {wanted}: runs of {scale.processes} processes run one at a time; leave it out")
    return wanted or (1 if has_gpus else usable_cpus())


def measure(
    experiment: Experiment,
    tables: Sequence[Table],
    *,
    at_once: int,
    kept: Sequence[Path] = (),
    only_seed: int | None = None,
) -> None:
    """Prepare the corpus, train and evaluate: everything that the tables need, with every seed or with one only, and
    that is not done yet, here or in the `kept` results of other experiments."""
    write_record(experiment)
    needs = needed_evaluations(experiment, tables, only_seed)
    if not needs:
        return
    workers = Workers.sharing_the_cores(at_once, job_environment(experiment.output))
    _prepare(experiment, workers)
    for results in kept:
        take_records(experiment, needs, results)
    _run_all(experiment, needs, workers)


def emit(experiment: Experiment, tables: Sequence[Table], *, only_seed: int | None = None) -> list[tuple[str, ...]]:
    """Write the run files and return the commands, for another machine to run. Every run is trained from its first
    step, because beginning with another run's checkpoint gives the same result."""
    source = experiment.source
    specs = [spec for spec in experiment.runs_of(tables, only_seed) if not experiment.is_finished(spec)]
    if specs and not source.is_ready and not experiment.scale.is_paper:
        raise UserError(f"--emit: {source.folder} must be prepared first; run {shlex.join(source.prepare or ())}")
    write_record(experiment)
    if source.is_ready and specs:
        write_held_out(source, experiment.corpus, experiment.scale, experiment.output)  # the runs validate on it
    write_run_files(experiment, specs)
    commands = [source.prepare or ()] if specs and not source.is_ready else []
    return commands + [train_command(experiment.config(spec), experiment.scale.processes) for spec in specs]


def needed_evaluations(
    experiment: Experiment, tables: Sequence[Table], only_seed: int | None = None
) -> dict[RunSpec, frozenset[Evaluation]]:
    """Return every run of the tables, with all seeds or with one, and the evaluations of its model; those that claims
    are about come first. Specs of two texts may be the same run."""
    specs = experiment.runs_of(tables, only_seed)
    found = {experiment.folder(spec): frozenset[Evaluation]() for spec in specs}
    for table in tables:
        for spec, evaluations in table.needs().items():
            for seed in experiment.seeds_or(only_seed):
                found[experiment.folder(spec.with_seed(seed))] |= evaluations
    ordered = sorted(specs, key=lambda spec: (spec.seed, _rank(spec)))
    return {spec: found[experiment.folder(spec)] for spec in ordered}


def _rank(spec: RunSpec) -> int:
    unseeded = spec.with_seed(1)
    return FIRST.index(unseeded) if unseeded in FIRST else len(FIRST)


def _prepare(experiment: Experiment, workers: Workers) -> None:
    source = experiment.source
    output = experiment.output
    if not source.is_ready:
        assert source.prepare is not None
        job = Job("prepare the corpus", source.prepare, output / "prepare.log", output / "prepare.out")
        run_jobs([job], replace(workers, at_once=1, threads=usable_cpus()))
    write_held_out(source, experiment.corpus, experiment.scale, output)


def train_command(run: RunConfig, processes: int) -> tuple[str, ...]:
    words: tuple[str, ...] = (sys.executable, "-m")
    if processes > 1:
        launcher = shutil.which("deepspeed") or str(Path(sys.executable).with_name("deepspeed"))
        words = (launcher, "--num_gpus", str(processes), "--module")
    return (*words, "megatron_style.train", str(run_file(run)))


def run_file(run: RunConfig) -> Path:
    return RunFolder(run.output.path).run_file


def write_run_files(experiment: Experiment, specs: Sequence[RunSpec]) -> None:
    for spec in specs:
        run = experiment.config(spec)
        run.output.path.mkdir(parents=True, exist_ok=True)
        save_run(run, run_file(run))


def _run_all(experiment: Experiment, needs: Mapping[RunSpec, frozenset[Evaluation]], workers: Workers) -> None:
    """Train what is not finished and evaluate it. Runs that can begin where another's first stage ends wait for it."""
    done = [spec for spec, evaluations in needs.items() if is_complete(experiment, spec, evaluations)]
    todo = [spec for spec in needs if spec not in done]
    waiting = [job for spec in done for job in evaluation_jobs(experiment, spec, needs[spec])]
    write_run_files(experiment, todo)
    donors = [experiment.config(spec) for spec in experiment.runs_of(experiment.tables())]
    origin = {"commit": commit(), "cores": os.cpu_count(), "at_once": workers.at_once, "threads": workers.threads}
    follow = {experiment.folder(spec): partial(evaluation_jobs, experiment, spec, needs[spec]) for spec in todo}
    for wave in waves([experiment.config(spec) for spec in todo], donors):
        jobs = [_training_job(run, donors, experiment.scale.processes, origin) for run in wave]
        chained = [replace(job, then=follow[run.output.path]) for job, run in zip(jobs, wave, strict=True)]
        run_jobs(waiting + chained, workers)
        waiting = []


def waves(runs: Sequence[RunConfig], donors: Sequence[RunConfig]) -> tuple[list[RunConfig], list[RunConfig]]:
    """Return the runs to train now, and those that can begin with their checkpoints. Of two runs with a common first
    stage, the one with more of it is trained now; the order is otherwise kept."""
    now: list[RunConfig] = []
    for run in sorted(runs, key=lambda run: run.stages[0].steps or 0, reverse=True):
        is_saved = any(checkpoint_for(run, donor) for donor in donors)
        if is_saved or not any(begins_like(run, other) for other in now):
            now.append(run)
    return [run for run in runs if run in now], [run for run in runs if run not in now]


def _training_job(run: RunConfig, donors: Sequence[RunConfig], processes: int, origin: Mapping[str, object]) -> Job:
    folder = run.output.path

    def begin() -> None:
        forget_records(folder)
        if (found := take_over(run, donors)) is not None:
            log(f"{folder.name}: begins with {found.parents[1].name} at step {run.stages[0].steps}")
        write_atomic(folder / ORIGIN, json.dumps(origin) + "\n")

    output = folder / "train.out"
    return Job(f"train {folder.name}", train_command(run, processes), folder / "train.log", output, before=begin)
