"""The records of runs: those that are complete stand for the run, so that a table can be made in several sittings, on
several machines, without the models of those before."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Mapping
from pathlib import Path

from megatron_style.base.command import log
from megatron_style.base.errors import UserError
from megatron_style.base.files import atomic_folder
from megatron_style.base.run_folder import RunFolder
from megatron_style.paper.experiment import Experiment, evaluation_file, kept_evaluation
from megatron_style.paper.measures import Evaluation
from megatron_style.paper.runs import RunSpec
from megatron_style.paper.work.evaluations import inputs_of
from megatron_style.paper.work.sharing import TAKEN


def is_complete(experiment: Experiment, spec: RunSpec, evaluations: Collection[Evaluation]) -> bool:
    """True if the run needs no training: its model is there, or the records of everything that is wanted of it."""
    return experiment.has_model(spec) or _has_records(experiment, spec, evaluations, experiment.folder(spec))


def take_records(experiment: Experiment, needs: Mapping[RunSpec, Collection[Evaluation]], results: Path) -> None:
    """Copy the complete records of kept results into the experiment, for runs that have not begun here."""
    kept = runs_in(results)
    for spec, evaluations in needs.items():
        target = experiment.folder(spec)
        source = kept / target.name
        has_begun = RunFolder(target).checkpoints.exists() or is_complete(experiment, spec, evaluations)
        if has_begun or not _has_records(experiment, spec, evaluations, source):
            continue
        with atomic_folder(target) as folder:
            shutil.copytree(source, folder, dirs_exist_ok=True)
        log(f"{target.name}: its records are complete in {results}; not trained again")


def forget_records(run: Path) -> None:
    """Remove the records of a run that is trained anew because they lacked something: they are the earlier model's."""
    if not RunFolder(run).checkpoints.exists():
        shutil.rmtree(run / "evaluations", ignore_errors=True)
        (run / TAKEN).unlink(missing_ok=True)


def runs_in(results: Path) -> Path:
    """Return the folder of the records in kept results, or refuse a folder that has none."""
    found = results / "results" / "runs"
    if not found.is_dir():
        raise UserError(f"--kept {results}: has no results/runs; give a folder that has the results of `reproduce`")
    return found


def _has_records(experiment: Experiment, spec: RunSpec, evaluations: Collection[Evaluation], folder: Path) -> bool:
    if not experiment.is_recorded(folder):
        return False
    for evaluation in evaluations:
        found = kept_evaluation(evaluation_file(folder, evaluation))
        if found is None or not inputs_of(experiment, spec, evaluation).items() <= dict(found["inputs"]).items():
            return False
    return True
