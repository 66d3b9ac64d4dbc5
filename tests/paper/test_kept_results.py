"""The results in docs/results are traceable: every number is recomputed from the records next to them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_style.paper.corpus import Source
from megatron_style.paper.experiment import Experiment, findings_of
from megatron_style.paper.results.presented import as_json, as_markdown, present
from megatron_style.paper.scale import scale_named

KEPT = Path(__file__).parents[2] / "docs" / "results"


@pytest.mark.parametrize("corpus", ["sotu", "wikitext-2"])
def test_every_number_is_in_the_records(corpus: str) -> None:
    folder = KEPT / corpus
    scale = scale_named("tiny")
    kept = Experiment(scale, Source("kept", folder), folder / "results", scale.seeds)
    found = findings_of(kept, kept.tables())
    page, complete = (folder / "results.md").read_text(encoding="utf-8"), set()
    for presented in (present(table, found) for table in kept.tables()):
        if presented.is_complete and presented.table.needs():
            number = presented.table.number
            complete.add(number)
            assert as_json(presented) == json.loads((folder / "results" / f"table{number}.json").read_text())
            assert as_markdown(presented) in page
    assert complete >= {1, 3, 4}, "the recipe of tiny has changed: `reproduce` again, and copy the results here"
