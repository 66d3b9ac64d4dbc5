"""The evaluations of a trained model, as calls of `evaluate` whose results are kept with digests of their inputs."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

from megatron_style.base.files import write_atomic
from megatron_style.base.model_files import weight_files
from megatron_style.base.run_folder import RunFolder
from megatron_style.data.store import store_files
from megatron_style.data.text import file_digest
from megatron_style.paper.experiment import Experiment, kept_evaluation
from megatron_style.paper.measures import Evaluation
from megatron_style.paper.runs import RunSpec
from megatron_style.paper.scale import ExperimentScale
from megatron_style.paper.work.processes import Job

_DATASTORE = "neighbours"
_INDEX = "index.faiss"  # in it


def evaluation_jobs(experiment: Experiment, spec: RunSpec, evaluations: Collection[Evaluation]) -> list[Job]:
    """Return the evaluations of a model that are not done yet; none if only the records of the run are there."""
    if not experiment.has_model(spec):
        return []
    plain: list[Job] = []
    searching: list[Job] = []
    for evaluation in sorted(evaluations, key=lambda each: each.name):
        job = _evaluation_job(experiment, spec, evaluation)
        if job is not None:
            (searching if evaluation.neighbours else plain).append(job)
    if searching:
        plain.append(datastore_job(experiment, spec, searching))
    return plain


def protocol_flags(scale: ExperimentScale, spec: RunSpec, evaluation: Evaluation, folder: Path) -> tuple[str, ...]:
    """Return the flags of `evaluate`; `folder` has the datastore."""
    flags = ["--mode", evaluation.mode]
    if evaluation.length:
        flags += ["--segment-length", str(scale.length(evaluation.length))]
    if evaluation.stride:
        length = evaluation.length or spec.length
        stride = 1 if evaluation.split == "short" else scale.stride(length, evaluation.stride)
        flags += ["--stride", str(stride)]
    if evaluation.mode == "nonoverlapping" or (evaluation.mode == "sliding" and evaluation.split == "short"):
        flags += ["--batch-rows", "1"]  # the paper measured speeds with one row at a time
    if evaluation.memory:
        scaled = scale.length
        flags += ["--segment-length", str(scaled(evaluation.memory.segment_length))]
        flags += ["--cache-length", str(scaled(evaluation.memory.cache_length)), "--same-length"]
        flags += ["--clamp-distance", str(scaled(evaluation.memory.clamp_distance))]
    if evaluation.neighbours:
        # The number of tokens shrinks with the lengths, and so do the neighbours among them.
        count = scale.length(evaluation.neighbours)
        flags += ["--neighbours", str(folder / _DATASTORE), "--k", str(count)]
        if scale.probe is not None:
            flags += ["--probe", str(scale.probe)]
    if evaluation.by_position:
        flags += ["--by-position", str(folder / f"{evaluation.name}.png")]
    return tuple(flags)


def inputs_of(experiment: Experiment, spec: RunSpec, evaluation: Evaluation) -> dict[str, object]:
    """Return what an evaluation depends on in addition to the model. Paths are relative to the run, so that records
    are the same wherever it is."""
    flags = protocol_flags(experiment.scale, spec, evaluation, Path())
    return {"data": file_digest(store_files(experiment.scored(evaluation))[0]), "flags": list(flags)}


def datastore_job(experiment: Experiment, spec: RunSpec, searching: Sequence[Job]) -> Job:
    """Return the job that makes a datastore of the training text, and ends at once if there is one. The jobs that
    search it come after it, or after that of its index if the search is approximate."""
    folder = experiment.folder(spec)
    store = folder / _DATASTORE
    command = (sys.executable, "-m", "megatron_style.neighbours")
    log = folder / "neighbours.log"
    flags = (str(RunFolder(folder).model), "--data", str(experiment.corpus.train), "--output", str(store))
    build = Job(f"datastore of {folder.name}", (*command, "build", *flags), log, folder / "neighbours.out")
    if experiment.scale.probe is None or (store / _INDEX).exists():
        return replace(build, then=lambda: searching)
    index = Job(f"index of {folder.name}", (*command, "index", str(store)), log, folder / "index.out")
    return replace(build, then=lambda: [replace(index, then=lambda: searching)])


def weights_digest(files: Sequence[Path]) -> str:
    """Return the digest of a model: that of its only file, or one of those of its shards."""
    digests = [file_digest(path) for path in files]
    return digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()


def _evaluation_job(experiment: Experiment, spec: RunSpec, evaluation: Evaluation) -> Job | None:
    """Return the job; None if the evaluation of this model and text is done."""
    folder = experiment.folder(spec)
    model = RunFolder(folder).model
    data = experiment.scored(evaluation)
    inputs = {"model": weights_digest(weight_files(model)), **inputs_of(experiment, spec, evaluation)}
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
    flags = protocol_flags(experiment.scale, spec, evaluation, folder)
    title = f"evaluate {folder.name}: {evaluation.name}"
    return Job(title, (*command, *flags), folder / "evaluate.log", printed, after=keep)
