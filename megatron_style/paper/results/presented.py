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
        """True if everything that can be measured was, with at least one seed."""
        return all(self.seeds.values())

    @property
    def seeds(self) -> dict[str, frozenset[int]]:
        """Return the seeds with which each row was measured completely, for the rows that can be measured."""
        rows = zip(self.table.rows, self.cells, strict=True)
        measured = ((row.label, _figures(row, cells)) for row, cells in rows)
        return {label: frozenset.intersection(*map(_seeds_of, figures)) for label, figures in measured if figures}

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


def _figures(row: Row, cells: Sequence[Cell]) -> list[Figures | None]:
    """Return the figures of the row's measures."""
    return [cell.here for measure, cell in zip(row.measures, cells, strict=True) if measure is not None]


def _seeds_of(figures: Figures | None) -> frozenset[int]:
    values = figures.values if figures else ()
    return frozenset(seed for seed, value in enumerate(values, start=1) if value is not None)


def present(table: Table, found: Findings) -> Presented:
    cells = tuple(_cells(row, found) for row in table.rows)
    outcomes = tuple((claim, claim.test(found)) for claim in claims_of(table.number))
    return Presented(table, cells, outcomes)


def claims_as_markdown(tables: Sequence[Presented]) -> str:
    """Return a section with the tables' claims that were tested, after a line that counts them."""
    outcomes = {claim.text: (claim, outcome) for table in tables for claim, outcome in table.outcomes}
    tested = [(claim, outcome) for claim, outcome in outcomes.values() if outcome.state != "not tested"]
    held = sum(outcome.state == "holds" for _, outcome in tested)
    if not tested:
        return ""
    lines = ["## Claims", "", f"Claims of the paper that hold: {held} of {len(tested)} tested.", ""]
    lines += ["| claim | tables | outcome |", "|---|---|---|"]
    for claim, outcome in tested:
        numbers = ", ".join(map(str, claim.tables))
        lines.append(f"| {claim.text} | {numbers} | {outcome.state} |")
    return "\n".join(lines)


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
    lines += [f"- **incomplete**: {gap}." for gap in gaps(presented)]
    return "\n".join(lines)


def gaps(presented: Presented) -> list[str]:
    """Return what names the rows that were not measured completely with every seed."""
    here = (cell.here for cells in presented.cells for cell in cells if cell.here)
    all_seeds = max((len(figures.values) for figures in here), default=1)
    found = []
    for seeds in dict.fromkeys(presented.seeds.values()):
        if len(seeds) < all_seeds:
            rows = ", ".join(label for label, each in presented.seeds.items() if each == seeds)
            which = f"with seed {', '.join(map(str, sorted(seeds)))} only" if seeds else "with no seed yet"
            found.append(f"measured completely {which}: {rows}")
    return found


def _cells(row: Row, found: Findings) -> tuple[Cell, ...]:
    return tuple(
        Cell(paper, None if row.subject is None or measure is None else found.get((row.subject, measure)))
        for paper, measure in zip(row.paper, row.measures, strict=True)
    )


def _cell_as_json(cell: Cell) -> dict[str, object]:
    """Return the figures by seed: null where there is none, "never" for infinity, which JSON does not have."""
    here = [_plain(value) for value in cell.here.values] if cell.here else None
    return {"paper": cell.paper, "here": here}


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


def _plain(value: float | None) -> float | str | None:
    return short(value) if value is not None and math.isinf(value) else value
