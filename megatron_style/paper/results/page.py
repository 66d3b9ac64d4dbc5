"""`results.md` and the folder `results` next to it: tables, charts, claims, and the records of every number."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_style.base.files import atomic_folder, write_atomic
from megatron_style.base.run_folder import RunFolder
from megatron_style.data.store import open_store
from megatron_style.model.shape import count_parameters
from megatron_style.paper.experiment import Experiment, findings_of
from megatron_style.paper.measures import Table
from megatron_style.paper.results.charts import draw_positions, draw_table, draw_times
from megatron_style.paper.results.curves import loss_by_position, perplexity_by_time
from megatron_style.paper.results.keeping import keep
from megatron_style.paper.results.presented import Presented, as_json, as_markdown, claims_as_markdown, present
from megatron_style.paper.runs import RunSpec
from megatron_style.paper.speeds import SPEEDS, Speeds
from megatron_style.paper.tables import BASELINE
from megatron_style.paper.work.jobs import ORIGIN
from megatron_style.paper.work.sharing import TAKEN

_TIMES = "perplexity_by_time.svg"
_POSITIONS = "loss_by_position.svg"


@dataclass(frozen=True)
class Results:
    page: Path
    tables: tuple[Presented, ...]  # those that were asked for


def write_results(experiment: Experiment, tables: Sequence[Table]) -> Results:
    """Write the page with the tables that were asked for and every other complete one, and return the former."""
    known = experiment.tables()
    found = findings_of(experiment, known)
    presented = [present(table, found) for table in known]
    asked = {table.number for table in tables}
    runs = [spec for spec in experiment.runs_of(known) if experiment.is_finished(spec)]
    shown = [each for each in presented if each.table.number in asked or (each.is_complete and not _is_of_books(each))]
    page = _write_page(experiment, shown, runs)
    return Results(page, tuple(each for each in presented if each.table.number in asked))


def _is_of_books(presented: Presented) -> bool:
    """True for the tables of Toronto Books, which other runs may complete although they have read another text."""
    return any(spec.text == "tbc" for spec in presented.table.needs())


def _write_page(experiment: Experiment, tables: Sequence[Presented], runs: Sequence[RunSpec]) -> Path:
    """Write the page and its folder from scratch, so that they always agree with the experiment."""
    with atomic_folder(experiment.output / "results") as folder:
        for presented in tables:
            stem = folder / f"table{presented.table.number}"
            stem.with_suffix(".json").write_text(json.dumps(as_json(presented), indent=1) + "\n", encoding="utf-8")
            draw_table(presented, stem.with_suffix(".svg"))
        charts = _draw_charts(experiment, folder)
        for spec in runs:
            keep(experiment, spec, folder)
        if experiment.speeds:
            shutil.copy(experiment.speeds.path, folder / SPEEDS)
    page = experiment.output / "results.md"
    write_atomic(page, _page(experiment, tables, charts, runs))
    return page


def _draw_charts(experiment: Experiment, folder: Path) -> dict[str, str]:
    """Draw what compares several systems, as far as it is measured, and return the titles by file."""
    times = f"Perplexity against training time, scale {experiment.scale.name}"
    positions = f"Loss by position in the segment, scale {experiment.scale.name}"
    drawn = {}
    if len(curves := perplexity_by_time(experiment)) > 1:
        draw_times(curves, times, folder / _TIMES)
        drawn[_TIMES] = times
    if len(curves := loss_by_position(experiment)) > 1:
        draw_positions(curves, positions, folder / _POSITIONS)
        drawn[_POSITIONS] = positions
    return drawn


def _page(experiment: Experiment, tables: Sequence[Presented], charts: dict[str, str], runs: Sequence[RunSpec]) -> str:
    parts = ["# The paper's tables, measured", "", *_setting(experiment, runs), "", claims_as_markdown(tables), ""]
    for presented in tables:
        number = presented.table.number
        parts += [as_markdown(presented), "", f"![Table {number}](results/table{number}.svg)", ""]
    for file, title in charts.items():
        parts += [f"## {title}", "", f"![{title}](results/{file})", ""]
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
        "Figures are mean and standard deviation over seeds. A claim holds if it holds with every seed that has all of "
        "its figures.",
    ]
    if experiment.speeds:
        lines.append(_source_of_speeds(experiment.speeds))
    if scale.windows:
        lines.append(
            f"`sliding`, where the paper scores one token per window, scores 1/{scale.windows} of a window here."
        )
    if scale.probe:
        lines.append(f"kNN-LM searches {scale.probe} lists of an index of its datastore, as its authors do.")
    if runs:
        config = experiment.config(BASELINE)
        corpus = experiment.corpus
        assert corpus.vocab_size is not None
        parameters = count_parameters(config.model, corpus.vocab_size)
        origin = _read(experiment.folder(runs[0]) / ORIGIN)
        lines += [
            f"The model has {parameters:,} parameters, the corpus {len(open_store(corpus.train)):,} tokens and a "
            f"vocabulary of {corpus.vocab_size:,}. Seeds: 1 to {experiment.seeds}. Trained on {origin.get('cores')} "
            f"cores, {origin.get('at_once')} runs at once, threads of each: {origin.get('threads')}.",
        ]
    return lines


def _source_of_speeds(speeds: Speeds) -> str:
    if speeds.of_scoring is None:
        apart, rest = "Training speeds and times are", "the speeds of inference"
    else:
        apart, rest = "Speeds and times are", "the speeds of kNN-LM"
    return (
        f"{apart} from `results/speeds.json`, measured apart from the runs, in turns; "
        f"{rest} are those of the evaluations, which shared the machine with other work."
    )


def _run_line(folder: Path) -> str:
    taken = _read(folder / TAKEN)
    begun = f"{taken['run']}, step {taken['step']}" if taken else "nothing"
    link = f"[{folder.name}](results/runs/{folder.name}/{RunFolder(folder).metrics.name})"
    return f"| {link} | {_read(folder / ORIGIN).get('commit')} | {begun} |"


def _read(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}
