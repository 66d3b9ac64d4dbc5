"""The work of an experiment: ordinary commands as separate processes, a few at a time.

Trainings are `train` on ordinary run files, and resume by themselves. What `evaluate --json` prints is kept with
digests of its model and text, so that no evaluation runs twice.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from megatron_style.base.command import log
from megatron_style.base.errors import RunFailed, UserError
from megatron_style.base.files import write_atomic
from megatron_style.base.launches import ROOT, commit
from megatron_style.base.model_files import weight_files
from megatron_style.base.run_folder import RunFolder
from megatron_style.config.run import RunConfig
from megatron_style.config.run_file import save_run
from megatron_style.data.preparation.workers import usable_cpus
from megatron_style.data.store import store_files
from megatron_style.data.text import file_digest
from megatron_style.paper.corpus import write_held_out
from megatron_style.paper.experiment import Experiment, kept_evaluation, write_record
from megatron_style.paper.measures import Evaluation, Table
from megatron_style.paper.runs import RunSpec
from megatron_style.paper.scale import ExperimentScale
from megatron_style.paper.sharing import begins_like, checkpoint_for, take_over

ORIGIN = "origin.json"
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


def run_jobs(jobs: Sequence[Job], *, at_once: int, threads: int) -> None:
    """Run the jobs in their order. The first failure ends all of them; what they have saved is not lost."""
    waiting = list(enumerate(jobs, start=1))
    running: dict[subprocess.Popen[bytes], Job] = {}
    begun = time.monotonic()
    with _sigterm_interrupts(), _ended_on_exit(running):
        while waiting or running:
            while waiting and len(running) < at_once:
                number, job = waiting.pop(0)
                left = _time_left(begun, done=number - 1 - len(running), of=len(jobs))
                log(f"[{number}/{len(jobs)}] {job.title}{left}")
                job.before()
                running[_start(job, threads)] = job
            time.sleep(_POLL_SECONDS)
            for process in [each for each in running if each.poll() is not None]:
                _finish(running.pop(process), process.returncode)


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
        raise RunFailed(f"{job.title}: exit code {code}, last line: {said} ({job.log}); start again to resume")
    job.after()


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


def measure(experiment: Experiment, tables: Sequence[Table], *, at_once: int) -> None:
    """Prepare the corpus, train and evaluate: everything that the tables need and that is not done yet."""
    write_record(experiment)
    specs = experiment.runs_of(tables)
    if not specs:
        return
    threads = _threads_each(at_once)
    _prepare(experiment)
    train_all(experiment, specs, at_once=at_once, threads=threads)
    evaluate_all(experiment, _needed_evaluations(experiment, tables), at_once=at_once, threads=threads)


def emit(experiment: Experiment, tables: Sequence[Table]) -> list[tuple[str, ...]]:
    """Write the run files and return the commands, for another machine to run. Every run is trained from its first
    step, because beginning with another run's checkpoint gives the same result."""
    source = experiment.source
    specs = [spec for spec in experiment.runs_of(tables) if not experiment.is_finished(spec)]
    if specs and not source.is_ready and not experiment.scale.is_paper:
        raise UserError(f"--emit: {source.folder} must be prepared first; run {shlex.join(source.prepare or ())}")
    write_record(experiment)
    if source.is_ready and specs:
        write_held_out(source, experiment.corpus, experiment.scale, experiment.output)  # the runs validate on it
    write_run_files(experiment, specs)
    commands = [source.prepare or ()] if specs and not source.is_ready else []
    return commands + [train_command(experiment.config(spec), experiment.scale.processes) for spec in specs]


def _threads_each(at_once: int) -> int:
    """Return OMP_NUM_THREADS, or an equal share of the cores. The variable is for machines that have other work:
    more threads than idle cores wait for one another."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    return int(given) if given.isdigit() and int(given) else max(1, usable_cpus() // at_once)


def _prepare(experiment: Experiment) -> None:
    source = experiment.source
    output = experiment.output
    if not source.is_ready:
        assert source.prepare is not None
        job = Job("prepare the corpus", source.prepare, output / "prepare.log", output / "prepare.out")
        run_jobs([job], at_once=1, threads=usable_cpus())
    write_held_out(source, experiment.corpus, experiment.scale, output)


def _needed_evaluations(experiment: Experiment, tables: Sequence[Table]) -> list[tuple[RunSpec, Evaluation]]:
    """Return each evaluation once, although tables share runs."""
    found: dict[tuple[Path, Evaluation], tuple[RunSpec, Evaluation]] = {}
    for table in tables:
        for spec, evaluations in table.needs().items():
            for seeded in experiment.seeded([spec]):
                for evaluation in sorted(evaluations, key=lambda each: each.name):
                    found[experiment.folder(seeded), evaluation] = (seeded, evaluation)
    return list(found.values())


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


def train_all(experiment: Experiment, specs: Sequence[RunSpec], *, at_once: int, threads: int) -> None:
    """Train what is not finished. Runs that can begin where another's first stage ends wait for it."""
    todo = [spec for spec in specs if not experiment.is_finished(spec)]
    write_run_files(experiment, todo)
    donors = [experiment.config(spec) for spec in experiment.runs_of(experiment.tables())]
    now, later = waves([experiment.config(spec) for spec in todo], donors)
    origin = {"commit": commit(), "cores": os.cpu_count(), "at_once": at_once, "threads": threads}
    for wave in (now, later):
        jobs = [_training_job(run, donors, experiment.scale.processes, origin) for run in wave]
        run_jobs(jobs, at_once=at_once, threads=threads)


def waves(runs: Sequence[RunConfig], donors: Sequence[RunConfig]) -> tuple[list[RunConfig], list[RunConfig]]:
    """Return the runs to train now, long first stages first, and those that can begin with their checkpoints."""
    now: list[RunConfig] = []
    later: list[RunConfig] = []
    for run in sorted(runs, key=lambda run: run.stages[0].steps or 0, reverse=True):
        is_saved = any(checkpoint_for(run, donor) for donor in donors)
        waits = not is_saved and any(begins_like(run, other) for other in now)
        (later if waits else now).append(run)
    return now, later


def _training_job(run: RunConfig, donors: Sequence[RunConfig], processes: int, origin: Mapping[str, object]) -> Job:
    folder = run.output.path

    def begin() -> None:
        if (found := take_over(run, donors)) is not None:
            log(f"{folder.name}: begins with {found.parents[1].name} at step {run.stages[0].steps}")
        write_atomic(folder / ORIGIN, json.dumps(origin) + "\n")

    output = folder / "train.out"
    return Job(f"train {folder.name}", train_command(run, processes), folder / "train.log", output, before=begin)


def evaluate_all(
    experiment: Experiment, needs: Sequence[tuple[RunSpec, Evaluation]], *, at_once: int, threads: int
) -> None:
    jobs = []
    datastores = {}
    for spec, evaluation in needs:
        job = _evaluation_job(experiment, spec, evaluation)
        if job is not None:
            jobs.append(job)
            if evaluation.neighbours:
                datastores[experiment.folder(spec)] = _datastore_job(experiment, spec)
    run_jobs(list(datastores.values()), at_once=at_once, threads=threads)
    run_jobs(jobs, at_once=at_once, threads=threads)


def protocol_flags(experiment: Experiment, spec: RunSpec, evaluation: Evaluation) -> tuple[str, ...]:
    flags = ["--mode", evaluation.mode]
    if evaluation.length:
        flags += ["--segment-length", str(experiment.scale.length(evaluation.length))]
    if evaluation.stride:
        length = evaluation.length or spec.length
        stride = 1 if evaluation.split == "short" else experiment.scale.stride(length, evaluation.stride)
        flags += ["--stride", str(stride)]
    if evaluation.mode == "nonoverlapping" or (evaluation.mode == "sliding" and evaluation.split == "short"):
        flags += ["--batch-rows", "1"]  # the paper measured speeds with one row at a time
    if evaluation.memory:
        scaled = experiment.scale.length
        flags += ["--segment-length", str(scaled(evaluation.memory.segment_length))]
        flags += ["--cache-length", str(scaled(evaluation.memory.cache_length)), "--same-length"]
        flags += ["--clamp-distance", str(scaled(evaluation.memory.clamp_distance))]
    if evaluation.neighbours:
        # The number of tokens shrinks with the lengths, and so do the neighbours among them.
        count = experiment.scale.length(evaluation.neighbours)
        flags += ["--neighbours", str(_datastore(experiment, spec)), "--k", str(count)]
    return tuple(flags)


def _datastore(experiment: Experiment, spec: RunSpec) -> Path:
    return experiment.folder(spec) / "neighbours"


def _datastore_job(experiment: Experiment, spec: RunSpec) -> Job:
    """Return the job that makes a datastore of the training text; it ends at once if there is one."""
    folder = experiment.folder(spec)
    command = (sys.executable, "-m", "megatron_style.neighbours", "build", str(RunFolder(folder).model))
    flags = ("--data", str(experiment.corpus.train), "--output", str(_datastore(experiment, spec)))
    return Job(f"datastore of {folder.name}", (*command, *flags), folder / "neighbours.log", folder / "neighbours.out")


def weights_digest(files: Sequence[Path]) -> str:
    """Return the digest of a model: that of its only file, or one of those of its shards."""
    digests = [file_digest(path) for path in files]
    return digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()


def _evaluation_job(experiment: Experiment, spec: RunSpec, evaluation: Evaluation) -> Job | None:
    """Return the job; None if the evaluation of this model and text is done."""
    folder = experiment.folder(spec)
    model = RunFolder(folder).model
    data = experiment.scored(evaluation)
    flags = protocol_flags(experiment, spec, evaluation)
    inputs = {
        "model": weights_digest(weight_files(model)),
        "data": file_digest(store_files(data)[0]),
        "flags": list(flags),
    }
    path = experiment.evaluation_file(spec, evaluation)
    kept = kept_evaluation(path)
    if kept is not None and kept["inputs"] == inputs:
        return None
    printed = path.with_suffix(".new")

    def keep() -> None:
        result = json.loads(printed.read_text(encoding="utf-8"))
        write_atomic(printed, json.dumps({"inputs": inputs, "result": result}, indent=1) + "\n")
        printed.replace(path)

    command = (sys.executable, "-m", "megatron_style.evaluate", str(model), "--data", str(data), "--json")
    title = f"evaluate {folder.name}: {evaluation.name}"
    return Job(title, (*command, *flags), folder / "evaluate.log", printed, after=keep)
