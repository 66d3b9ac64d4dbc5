"""The results in docs/results are traceable: every number is recomputed from the records next to them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import NamedTuple

import pytest

from megatron_style.paper.corpus import Source
from megatron_style.paper.experiment import Experiment, findings_of
from megatron_style.paper.results.presented import as_json, as_markdown, claims_as_markdown, present
from megatron_style.paper.scale import scale_named
from megatron_style.paper.tables import table

KEPT = Path(__file__).parents[2] / "docs" / "results"


class Page(NamedTuple):
    scale: str
    tables: frozenset[int]
    seeds: int


PAGES = {
    "sotu": Page("tiny", frozenset({1, 3, 4}), 2),
    "wikitext-2": Page("tiny", frozenset({1, 3, 4}), 2),
    "wikitext-2-systems": Page("tiny", frozenset({5}), 1),
    "wikitext-2-small": Page("small", frozenset({1, 2, 3, 4, 5, 6, 7, 8}), 3),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PAGES)
def test_every_number_is_in_the_records(name: str) -> None:
    folder = KEPT / name
    wanted = PAGES[name]
    kept = Experiment(scale_named(wanted.scale), Source("kept", folder), folder / "results", wanted.seeds)
    page = (folder / "results.md").read_text(encoding="utf-8")
    tables = {number: table(number).at(kept.scale) for number in wanted.tables}
    found = findings_of(kept, kept.tables())
    for number, each in tables.items():
        presented = present(each, found)
        remedy = f"the recipe of {wanted.scale} has changed: `reproduce` again, and copy the results here"
        assert any(presented.seeds.values()), remedy
        assert as_json(presented) == json.loads((folder / "results" / f"table{number}.json").read_text())
        assert as_markdown(presented) in page
    shown = list(map(int, re.findall(r"^## Table (\d+):", page, flags=re.MULTILINE)))
    assert set(shown) - {10} == wanted.tables  # table 10 is planned, and has no records
    assert claims_as_markdown([present(table(number).at(kept.scale), found) for number in shown]) in page


def test_kept_results_do_not_name_the_machine() -> None:
    for path in KEPT.rglob("*"):
        if path.suffix in (".json", ".jsonl", ".yaml", ".md"):
            assert not re.search(r"(?<![\w.])/(work|tmp|home|root)/", path.read_text(encoding="utf-8")), path
