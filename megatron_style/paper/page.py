"""`results.md` and the folder `results` next to it: tables, charts, claims, and the records of every number."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from megatron_style.base.events import Event, SampleEvent, TrainEvent, ValidEvent, line_of, read_events
from megatron_style.base.files import atomic_folder, write_atomic
from megatron_style.base.run_folder import RUN_FILE, RunFolder
from megatron_style.data.store import open_store
from megatron_style.model.shape import count_parameters
from megatron_style.paper.claims import Claim, Outcome, claims_of
from megatron_style.paper.experiment import Experiment, findings_of
from megatron_style.paper.jobs import ORIGIN
from megatron_style.paper.measures import Figures, Findings, Row, Table, short
from megatron_style.paper.runs import RunSpec
from megatron_style.paper.sharing import TAKEN
from megatron_style.paper.tables import BASELINE

_MOST_LINES = 60  # training events that are kept per run
_KEPT = (RUN_FILE, ORIGIN, TAKEN)


class Cell(NamedTuple):
    paper: float | None
    here: Figures | None


@dataclass(frozen=True)
class Presented:
    table: Table
    cells: tuple[tuple[Cell, ...], ...]  # by row, by column
    outcomes: tuple[tuple[Claim, Outcome], ...]

    @property
    def is_complete(self) -> bool:
        """True if nothing that can be measured is missing."""
        wanted = chain.from_iterable(row.measures for row in self.table.rows)
        found = chain.from_iterable(self.cells)
        return all(cell.here is not None for measure, cell in zip(wanted, found, strict=True) if measure is not None)

    @property
    def header(self) -> list[str]:
        header = [""]
        for name, is_published in zip(self.table.columns, self._published, strict=True):
            header += [f"{name}, paper", f"{name}, here"] if is_published else [name]
        return header

    @property
    def lines(self) -> list[list[str]]:
        pairs = zip(self.table.rows, self.cells, strict=True)
        return [[row.label, *_texts(cells, self._published)] for row, cells in pairs]

    @property
    def _published(self) -> list[bool]:
        """Return, for each column, whether the paper has a figure in it."""
        figures = (row.paper for row in self.table.rows)
        return [any(figure is not None for figure in column) for column in zip(*figures, strict=True)]


def present(table: Table, found: Findings) -> Presented:
    cells = tuple(_cells(row, found) for row in table.rows)
    outcomes = tuple((claim, claim.test(found)) for claim in claims_of(table.number))
    return Presented(table, cells, outcomes)


def as_json(presented: Presented) -> dict[str, object]:
    table = presented.table
    rows = []
    for row, cells in zip(table.rows, presented.cells, strict=True):
        figures = {name: _cell_as_json(cell) for name, cell in zip(table.columns, cells, strict=True)}
        rows.append({"row": row.label, "figures": figures})
    claims = [
        {"claim": claim.text, "state": outcome.state, "evidence": outcome.evidence}
        for claim, outcome in presented.outcomes
    ]
    return {"table": table.number, "title": table.title, "rows": rows, "claims": claims}


def as_markdown(presented: Presented) -> str:
    table = presented.table
    lines = [f"## Table {table.number}: {table.title}", "", *_markdown_table(presented.header, presented.lines), ""]
    lines += [f"- **{outcome.state}**: {claim.text} {outcome.evidence}." for claim, outcome in presented.outcomes]
    return "\n".join(lines)


def _cells(row: Row, found: Findings) -> tuple[Cell, ...]:
    return tuple(
        Cell(paper, None if row.subject is None or measure is None else found.get((row.subject, measure)))
        for paper, measure in zip(row.paper, row.measures, strict=True)
    )


def _cell_as_json(cell: Cell) -> dict[str, object]:
    return {"paper": cell.paper, "here": [_plain(value) for value in cell.here.values] if cell.here else None}


def _texts(cells: Sequence[Cell], published: Sequence[bool]) -> list[str]:
    texts = []
    for cell, is_published in zip(cells, published, strict=True):
        if is_published:
            texts.append("-" if cell.paper is None else short(cell.paper))
        texts.append(str(cell.here) if cell.here else "-")
    return texts


def _markdown_table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    rule = ["---", *["--:"] * (len(header) - 1)]
    return [f"| {' | '.join(cells)} |" for cells in (header, rule, *lines)]


def _plain(value: float) -> float | None:
    """Return None for infinity ("never"), which JSON does not have."""
    return value if math.isfinite(value) else None


def draw(presented: Presented, path: Path) -> None:
    """Draw the paper's figures and the measured ones on separate axes, to compare the shapes of the curves."""
    table = presented.table
    labels = [row.label for row in table.rows]
    by_column = zip(*presented.cells, strict=True)
    columns = [index for index, cells in enumerate(by_column) if any(cell.here for cell in cells)]
    figure = Figure(figsize=(max(6, 2 + 0.35 * len(labels)), 2 + 2 * len(columns)), layout="constrained")
    panels = figure.subplots(len(columns), 1, sharex=True, squeeze=False)[:, 0]
    for axes, index in zip(panels, columns, strict=True):
        _draw_column(axes, presented, index)
        axes.set_ylabel(f"{table.columns[index]}\nhere")
    panels[-1].set_xticks(range(len(labels)), labels, rotation=60, ha="right", fontsize="small")
    figure.suptitle(f"Table {table.number}: {table.title}", fontsize="medium")
    with rc_context({"svg.hashsalt": "table"}):  # the same figures give the same file
        figure.savefig(path, metadata={"Date": None})


def _draw_column(axes: Axes, presented: Presented, index: int) -> None:
    pairs = [cells[index] for cells in presented.cells]
    here = [figures.mean if figures and math.isfinite(figures.mean) else math.nan for _, figures in pairs]
    spread = [(figures.spread if figures else None) or 0.0 for _, figures in pairs]
    measured = axes.errorbar(range(len(pairs)), here, yerr=spread, fmt="o-", capsize=3, label="here")
    paper_axes = axes.twinx()
    paper = [math.nan if figure is None else figure for figure, _ in pairs]
    (published,) = paper_axes.plot(range(len(pairs)), paper, "s--", color="tab:gray", label="paper")
    paper_axes.set_ylabel("paper", color="tab:gray")
    axes.legend(handles=[measured, published], frameon=False, fontsize="small")
    axes.grid(alpha=0.3)


@dataclass(frozen=True)
class Results:
    page: Path
    tables: tuple[Presented, ...]  # those that were asked for


def write_results(experiment: Experiment, tables: Sequence[Table]) -> Results:
    """Write the page with every complete table, and return the tables that were asked for."""
    known = experiment.tables()
    found = findings_of(experiment, known)
    presented = (present(table, found) for table in known)
    runs = [spec for spec in experiment.runs_of(known) if experiment.is_finished(spec)]
    page = _write_page(experiment, [each for each in presented if each.is_complete], runs)
    return Results(page, tuple(present(table, found) for table in tables))


def _write_page(experiment: Experiment, tables: Sequence[Presented], runs: Sequence[RunSpec]) -> Path:
    """Write the page and its folder from scratch, so that they always agree with the experiment."""
    with atomic_folder(experiment.output / "results") as folder:
        for presented in tables:
            stem = folder / f"table{presented.table.number}"
            stem.with_suffix(".json").write_text(json.dumps(as_json(presented), indent=1) + "\n", encoding="utf-8")
            draw(presented, stem.with_suffix(".svg"))
        for spec in runs:
            _keep(experiment.folder(spec), folder / "runs" / experiment.folder(spec).name)
    page = experiment.output / "results.md"
    write_atomic(page, _page(experiment, tables, runs))
    return page


def _keep(run: Path, target: Path) -> None:
    (target / "evaluations").mkdir(parents=True)
    for name in _KEPT:
        if (run / name).is_file():
            shutil.copy(run / name, target / name)
    for file in sorted((run / "evaluations").glob("*.json")):
        shutil.copy(file, target / "evaluations" / file.name)
    lines = "".join(line_of(event) + "\n" for event in thinned(list(read_events(RunFolder(run).metrics))))
    RunFolder(target).metrics.write_text(lines, encoding="utf-8")


def thinned(events: Sequence[Event]) -> list[Event]:
    """Return the events without samples, without losses by position, and with only some of training, among them the
    last, which has all totals."""
    trained = [event.step for event in events if isinstance(event, TrainEvent)]
    every = -(-len(trained) // _MOST_LINES)
    kept = {*trained[::-1][:: every or 1]}
    found: list[Event] = []
    for event in events:
        if isinstance(event, SampleEvent) or (isinstance(event, TrainEvent) and event.step not in kept):
            continue
        found.append(replace(event, by_position=None) if isinstance(event, ValidEvent) else event)
    return found


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
        "Figures are mean and standard deviation over seeds; a claim holds if it holds with every seed.",
    ]
    if scale.windows:
        lines.append(
            f"`sliding`, where the paper scores one token per window, scores 1/{scale.windows} of a window here."
        )
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


def _run_line(folder: Path) -> str:
    taken = _read(folder / TAKEN)
    begun = f"{taken['run']}, step {taken['step']}" if taken else "nothing"
    link = f"[{folder.name}](results/runs/{folder.name}/{RunFolder(folder).metrics.name})"
    return f"| {link} | {_read(folder / ORIGIN).get('commit')} | {begun} |"


def _read(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}
