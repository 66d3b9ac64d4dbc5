"""`results.md` and the folder `results` beside it: tables, charts, claims, and the records behind every number."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_style.base.events import Event, read_events
from megatron_style.base.files import whole_folder
from megatron_style.data.store import open_store
from megatron_style.model.shape import count_parameters
from megatron_style.paper.chart import draw
from megatron_style.paper.experiment import Experiment
from megatron_style.paper.presentation import Presented, as_json, as_markdown
from megatron_style.paper.runs import RunSpec
from megatron_style.paper.sharing import TAKEN
from megatron_style.paper.subjects import BASELINE
from megatron_style.paper.training import ORIGIN

_MOST_LINES = 60  # of training, kept of a run
_KEPT = ("run.yaml", ORIGIN, TAKEN)


def write_results(experiment: Experiment, tables: Sequence[Presented], runs: Sequence[RunSpec]) -> Path:
    """Both are made anew from what the experiment holds, so they always agree with it."""
    with whole_folder(experiment.output / "results") as folder:
        for presented in tables:
            stem = folder / f"table{presented.table.number}"
            stem.with_suffix(".json").write_text(json.dumps(as_json(presented), indent=1) + "\n", encoding="utf-8")
            draw(presented, stem.with_suffix(".svg"))
        for spec in runs:
            _keep(experiment.folder(spec), folder / "runs" / experiment.folder(spec).name)
    page = experiment.output / "results.md"
    page.write_text(_page(experiment, tables, runs), encoding="utf-8")
    return page


def _keep(run: Path, target: Path) -> None:
    (target / "evaluations").mkdir(parents=True)
    for name in _KEPT:
        if (run / name).is_file():
            shutil.copy(run / name, target / name)
    for file in sorted((run / "evaluations").glob("*.json")):
        shutil.copy(file, target / "evaluations" / file.name)
    lines = "".join(json.dumps(event) + "\n" for event in thinned(read_events(run / "metrics.jsonl")))
    (target / "metrics.jsonl").write_text(lines, encoding="utf-8")


def thinned(events: Sequence[Event]) -> list[Event]:
    """Without samples and losses by position, and of training only some lines: the last one has all totals."""
    trained = [event for event in events if event["kind"] == "train"]
    every = -(-len(trained) // _MOST_LINES)
    kept = {event["step"] for event in trained[::-1][:: every or 1]}
    return [
        {key: value for key, value in event.items() if key != "by_position"}
        for event in events
        if event["kind"] not in ("sample", "train") or (event["kind"] == "train" and event["step"] in kept)
    ]


def _page(experiment: Experiment, tables: Sequence[Presented], runs: Sequence[RunSpec]) -> str:
    parts = ["# The paper's tables, measured", "", *_setting(experiment, runs), ""]
    for presented in tables:
        number = presented.table.number
        parts += [as_markdown(presented), "", f"![Table {number}](results/table{number}.svg)", ""]
    if runs:
        parts += ["## The runs", "", "| run | commit | begun with |", "|---|---|---|"]
        parts += [_run_line(experiment.folder(spec)) for spec in runs]
    return "\n".join(parts) + "\n"


def _setting(experiment: Experiment, runs: Sequence[RunSpec]) -> list[str]:
    scale = experiment.scale
    lines = [
        f"Scale `{scale.name}`: segments are {scale.shrink} times shorter than the paper's, whose lengths and epochs "
        f"name the rows. A run has {scale.steps:,} updates of {scale.tokens_per_batch * scale.processes:,} tokens; "
        f"50 of the paper's epochs are {scale.steps_of_50_epochs:,} updates.",
        "Figures are mean and standard deviation over seeds; a claim holds if it does with every seed.",
    ]
    if scale.windows:
        lines.append(
            f"`sliding`, where the paper counts one token a window, counts 1/{scale.windows} of a window here."
        )
    if runs:
        config, corpus = experiment.config(BASELINE), experiment.corpus
        assert corpus.vocab_size is not None
        parameters = count_parameters(config.model, corpus.vocab_size)
        origin = _read(experiment.folder(runs[0]) / ORIGIN)
        lines += [
            f"The model has {parameters:,} parameters, the corpus {len(open_store(corpus.train)):,} tokens and a "
            f"vocabulary of {corpus.vocab_size:,}. Seeds: 1 to {experiment.seeds}. Trained on {origin.get('cores')} "
            f"cores, {origin.get('at_once')} runs at once, threads of each: {origin.get('threads')}.",
        ]
    return lines


def _run_line(folder: Path) -> str:
    taken = _read(folder / TAKEN)
    begun = f"{taken['run']}, step {taken['step']}" if taken else "nothing"
    link = f"[{folder.name}](results/runs/{folder.name}/metrics.jsonl)"
    return f"| {link} | {_read(folder / ORIGIN).get('commit')} | {begun} |"


def _read(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}
