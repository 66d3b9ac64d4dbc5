"""Claims are judged from made-up figures."""

from __future__ import annotations

import math

import pytest

from megatron_style.paper.claims import CLAIMS, Claim
from megatron_style.paper.judgement import falls_from_its_peak, grows, judge, within
from megatron_style.paper.measures import Figures, Findings
from megatron_style.paper.tables import (
    BASELINE,
    CACHED_SHORT,
    NONOVERLAPPING,
    PIA_CACHE,
    STAGED,
    WALKED,
    all_tables,
    loss,
    perplexity,
)

EQUAL_LOSSES: Findings = {
    (PIA_CACHE, loss(CACHED_SHORT)): Figures((4.0,)),
    (PIA_CACHE, loss(WALKED)): Figures((4.00001,)),
}


def papers_findings() -> Findings:
    """Return the paper's own figures, as if they had been measured."""
    return {
        (row.subject, measure): Figures((float(figure),))
        for table in all_tables()
        for row in table.rows
        for measure, figure in zip(row.measures, row.paper, strict=True)
        if row.subject is not None and measure is not None and figure is not None
    }


PAPER = {**papers_findings(), **EQUAL_LOSSES}


def turned(found: Findings) -> Findings:
    """What was high is low: every order is the other way round, and what was near each other is far apart."""
    return {key: Figures(tuple((100 / value) ** 9 for value in figures.measured)) for key, figures in found.items()}


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.text)
def test_a_claim_holds_does_not_hold_or_is_not_tested(claim: Claim) -> None:
    assert claim.test(PAPER).state == "holds"  # of the paper's own figures
    assert claim.test(turned(PAPER)).state == "does not hold"
    assert claim.test({}).state == "not tested"
    assert claim.test({}).evidence.startswith("not measured")


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.text)
def test_a_claim_must_hold_with_every_seed(claim: Claim) -> None:
    other = turned(PAPER)
    seeds = {key: Figures((*PAPER[key].values, *other[key].values)) for key in PAPER}
    assert claim.test(seeds).state == "does not hold"


def test_the_evidence_has_mean_and_spread() -> None:
    measure = perplexity(NONOVERLAPPING)
    found: Findings = {(STAGED, measure): Figures((10.0, 12.0)), (BASELINE, measure): Figures((13.0, 13.5))}
    (claim,) = (claim for claim in CLAIMS if claim.text == "Staged training ends better than the baseline.")
    assert claim.test(found).evidence == "staged 11 ± 1.4, baseline 13.25 ± 0.35"
    assert claim.test(found).state == "holds"


@pytest.mark.parametrize(
    ("staged", "baseline", "state", "evidence"),
    [
        ((10, 14), (13, 13), "does not hold", "staged 12 ± 2.8, baseline 13; holds with 1 of 2 seeds"),
        ((10, None), (13, 99), "holds", "staged 10, baseline 13; measured with 1 of 2 seeds"),
        ((None, 14), (99, 13), "does not hold", "staged 14, baseline 13; measured with 1 of 2 seeds"),
        ((10, None), (None, 13), "not tested", "no seed has all of: staged, baseline"),
    ],
)
def test_a_claim_is_judged_seed_by_seed_where_all_is_measured(
    staged: tuple[float | None, ...], baseline: tuple[float | None, ...], state: str, evidence: str
) -> None:
    outcome = judge({"staged": Figures(staged), "baseline": Figures(baseline)}, grows)
    assert (outcome.state, outcome.evidence) == (state, evidence)


def test_equal_figures_are_no_order() -> None:
    measure = perplexity(NONOVERLAPPING)
    found: Findings = {(STAGED, measure): Figures((13.0,)), (BASELINE, measure): Figures((13.0,))}
    (claim,) = (claim for claim in CLAIMS if claim.text == "Staged training ends better than the baseline.")
    assert claim.test(found).state == "does not hold"


def test_never_is_shown_as_such() -> None:
    outcome = judge({"share": Figures((0.5, math.inf))}, lambda values: values[0] < 1)
    assert (outcome.state, outcome.evidence) == ("does not hold", "share never; holds with 1 of 2 seeds")


@pytest.mark.parametrize(
    ("values", "holds"), [((3, 4, 5, 2, 1), True), ((3, 2, 2), False), ((1, 2, 3), False), ((5, 4, 1, 2), False)]
)
def test_a_fall_may_begin_after_the_shortest(values: tuple[float, ...], holds: bool) -> None:
    assert falls_from_its_peak(values) == holds


def test_within_a_tenth() -> None:
    assert within(0.1)((10.0, 11.0))
    assert not within(0.1)((10.0, 11.1))


def test_every_table_but_those_without_one_has_a_claim() -> None:
    assert {number for claim in CLAIMS for number in claim.tables} == set(range(1, 13)) - {7, 8}
