"""Trained models, evaluated: what `evaluate --json` says is kept, with what it was said of, and asked for once."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_style.data.store import store_files
from megatron_style.data.text import file_digest
from megatron_style.paper.experiment import Experiment
from megatron_style.paper.measures import Evaluation
from megatron_style.paper.processes import Job, run_jobs
from megatron_style.paper.runs import RunSpec


def evaluate_all(
    experiment: Experiment, needs: Sequence[tuple[RunSpec, Evaluation]], *, at_once: int, threads: int
) -> None:
    jobs = [_job(experiment, spec, evaluation) for spec, evaluation in needs]
    run_jobs([job for job in jobs if job is not None], at_once=at_once, threads=threads)


def kept_evaluation(path: Path) -> Mapping[str, Any] | None:
    try:
        kept: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return kept if {"inputs", "result"} <= kept.keys() else None
    except (OSError, ValueError, AttributeError):
        return None


def protocol_flags(experiment: Experiment, spec: RunSpec, evaluation: Evaluation) -> tuple[str, ...]:
    flags = ["--mode", evaluation.mode]
    if evaluation.stride:
        stride = 1 if evaluation.split == "short" else experiment.scale.stride(spec.length, evaluation.stride)
        flags += ["--stride", str(stride)]
    if evaluation.mode == "nonoverlapping" or (evaluation.mode == "sliding" and evaluation.split == "short"):
        flags += ["--batch-rows", "1"]  # the paper's speeds are of one row at a time
    return tuple(flags)


def _job(experiment: Experiment, spec: RunSpec, evaluation: Evaluation) -> Job | None:
    """None: it has been done, of this very model and text."""
    folder, data = experiment.folder(spec), experiment.scored(evaluation)
    flags = protocol_flags(experiment, spec, evaluation)
    inputs = {
        "model": file_digest(folder / "model" / "model.safetensors"),
        "data": file_digest(store_files(data)[0]),
        "flags": list(flags),
    }
    path = experiment.evaluation_file(spec, evaluation)
    kept = kept_evaluation(path)
    if kept is not None and kept["inputs"] == inputs:
        return None
    said = path.with_suffix(".new")

    def keep() -> None:
        result = json.loads(said.read_text(encoding="utf-8"))
        said.write_text(json.dumps({"inputs": inputs, "result": result}, indent=1) + "\n", encoding="utf-8")
        said.replace(path)

    command = (sys.executable, "-m", "megatron_style.evaluate", str(folder / "model"), "--data", str(data), "--json")
    title = f"evaluate {folder.name}: {evaluation.name}"
    return Job(title, (*command, *flags), folder / "evaluate.log", said, after=keep)
