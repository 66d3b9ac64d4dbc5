"""A table with its figures, as text, Markdown and JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_style.paper.claims import Claim, claims_of
from megatron_style.paper.judgement import Outcome
from megatron_style.paper.measures import Figures, Findings, Row, Table, short


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
        return not self.missing

    @property
    def missing(self) -> list[str]:
        """Return the labels of the rows that have not been measured completely."""
        rows = zip(self.table.rows, self.cells, strict=True)
        return [row.label for row, cells in rows if _lacks_figures(row, cells)]

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


def _lacks_figures(row: Row, cells: Sequence[Cell]) -> bool:
    return any(cell.here is None for measure, cell in zip(row.measures, cells, strict=True) if measure is not None)


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
    if missing := presented.missing:
        lines.append(f"- **incomplete**: not measured yet with every seed: {', '.join(missing)}.")
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
