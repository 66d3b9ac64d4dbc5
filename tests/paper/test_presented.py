"""Tables as text and as JSON: what was measured with fewer seeds is named."""

from __future__ import annotations

import math

from megatron_style.paper.measures import Figures, Findings, TrainSpeed
from megatron_style.paper.results.presented import Presented, as_json, as_markdown, claims_as_markdown, present
from megatron_style.paper.scale import SCALES
from megatron_style.paper.tables import CACHED, PIA_CACHE, SHORTFORMER, perplexity, table

PERPLEXITY = perplexity(CACHED)


def shown(perplexities: Figures | None) -> Presented:
    """Table 4 with two rows: PIA + cache with two seeds, and the Shortformer with the given perplexities."""
    found: Findings = {
        (PIA_CACHE, TrainSpeed()): Figures((100.0, 100.0)),
        (PIA_CACHE, PERPLEXITY): Figures((20.0, 21.0)),
        (SHORTFORMER, TrainSpeed()): Figures((110.0, 110.0)),
    }
    given: Findings = {(SHORTFORMER, PERPLEXITY): perplexities} if perplexities else {}
    return present(table(4).at(SCALES["miniature"]), {**found, **given})


def test_rows_with_fewer_seeds_are_named() -> None:
    every = shown(Figures((18.0, 19.0)))
    first = shown(Figures((18.0, None)))
    none = shown(None)
    assert [each.is_complete for each in (every, first, none)] == [True, True, False]
    assert "incomplete" not in as_markdown(every)
    assert "- **incomplete**: measured completely with seed 1 only: first L=128." in as_markdown(first)
    assert "- **incomplete**: measured completely with no seed yet: first L=128." in as_markdown(none)


def test_a_figure_has_its_seed_in_json() -> None:
    rows = as_json(shown(Figures((None, math.inf))))["rows"]
    assert isinstance(rows, list)
    figures = {row["row"]: row["figures"]["ppl"]["here"] for row in rows}
    assert figures == {"first L=128": [None, "never"], "L=512 all through": [20.0, 21.0]}


def test_speeds_that_all_seeds_share_have_no_spread() -> None:
    lines = shown(Figures((18.0, 19.0))).lines
    assert {line[0]: line[2] for line in lines} == {"first L=128": "110", "L=512 all through": "100"}


def test_claims_are_counted_once() -> None:
    tables = [shown(Figures((18.0, 22.0))), shown(Figures((18.0, 22.0)))]
    assert "Claims of the paper that hold: 0 of 1 tested." in claims_as_markdown(tables)
    assert claims_as_markdown(tables).count("A first stage of short segments makes PIA with cache better.") == 1
    one_seed = claims_as_markdown([shown(Figures((18.0, None)))])
    assert "Claims of the paper that hold: 1 of 1 tested." in one_seed
