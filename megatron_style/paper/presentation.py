"""A table beside the paper's, and its claims: as rows to print, as JSON and as Markdown."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_style.paper.claims import Claim, claims_of
from megatron_style.paper.findings import Figures, Findings, short
from megatron_style.paper.grid import Row, Table
from megatron_style.paper.judging import Outcome


@dataclass(frozen=True)
class Presented:
    table: Table
    cells: tuple[tuple[tuple[float | None, Figures | None], ...], ...]  # of each row, of each column: paper, measured
    outcomes: tuple[tuple[Claim, Outcome], ...]

    @property
    def is_complete(self) -> bool:
        """Nothing that can be measured is missing."""
        wanted = (measure for row in self.table.rows for measure in row.measures)
        found = (here for cells in self.cells for _, here in cells)
        return all(here is not None for measure, here in zip(wanted, found, strict=True) if measure is not None)

    @property
    def header(self) -> list[str]:
        return ["", *(f"{name}{kind}" for name in self.table.columns for kind in (", paper", ", here"))]

    @property
    def lines(self) -> list[list[str]]:
        return [
            [row.label, *(text for paper, here in cells for text in (_told(paper), str(here) if here else "-"))]
            for row, cells in zip(self.table.rows, self.cells, strict=True)
        ]


def present(table: Table, found: Findings) -> Presented:
    cells = tuple(_cells(row, found) for row in table.rows)
    outcomes = tuple((claim, claim.test(found)) for claim in claims_of(table.number))
    return Presented(table, cells, outcomes)


def as_json(presented: Presented) -> dict[str, object]:
    table = presented.table
    rows = [
        {
            "row": row.label,
            "figures": {
                name: {"paper": paper, "here": [_plain(value) for value in here.values] if here else None}
                for name, (paper, here) in zip(table.columns, cells, strict=True)
            },
        }
        for row, cells in zip(table.rows, presented.cells, strict=True)
    ]
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


def _cells(row: Row, found: Findings) -> tuple[tuple[float | None, Figures | None], ...]:
    return tuple(
        (paper, None if row.subject is None or measure is None else found.get((row.subject, measure)))
        for paper, measure in zip(row.paper, row.measures, strict=True)
    )


def _markdown_table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    rule = ["---", *["--:"] * (len(header) - 1)]
    return [f"| {' | '.join(cells)} |" for cells in (header, rule, *lines)]


def _told(paper: float | None) -> str:
    return "-" if paper is None else short(paper)


def _plain(value: float) -> float | None:
    """JSON has no infinity: never is null."""
    return value if math.isfinite(value) else None
