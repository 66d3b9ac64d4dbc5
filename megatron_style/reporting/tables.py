"""The page's tables. Each scrolls in its own box, so that the page itself never does."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from megatron_style.base.units import (
    COUNT,
    FLOPS,
    FLOPS_PER_SECOND,
    MEMORY,
    NOT_RECORDED,
    TIME,
    Quantity,
    perplexity_text,
    three_digits,
)
from megatron_style.reporting.comparison import (
    Difference,
    best,
    compares,
    differences,
    final,
    loss_of,
    match,
    stage_figures,
)
from megatron_style.reporting.history import HeldOut, RunHistory
from megatron_style.reporting.markup import Markup, breakable, join, tag, text

_MOST_NAMED = 5  # of the differing settings, in the table of runs; all are in a table of their own


def table(about: str, head: Sequence[Markup], rows: Sequence[tuple[Markup, Sequence[Markup]]]) -> Markup:
    """Return a table. A row is its heading and its cells, each a `td` element."""
    heads = join(tag("th", name, scope="col") for name in head)
    body = join(tag("tr", tag("th", tag("span", name, class_="name"), scope="row"), *cells) for name, cells in rows)
    inside = tag("table", tag("thead", tag("tr", heads)), tag("tbody", body), aria_label=about)
    box = tag("div", inside, class_="box", tabindex="0", role="region", aria_label=about)
    return tag("figure", tag("figcaption", text(about)), box, class_="table")


def _cells(*words: str) -> list[Markup]:
    return [tag("td", text(word)) for word in words]


def run_name(number: int, run: RunHistory) -> Markup:
    return join((tag("span", class_=f"key run-{number}"), breakable(run.name)))


def in_one_unit(name: str, quantity: Quantity, values: Sequence[float | None]) -> tuple[str, list[str]]:
    """Return the head and the cells of a column whose values share the unit of the largest, which the head names."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    unit = quantity.unit(max(known, default=0.0))
    word = unit.long.strip()
    cells = [NOT_RECORDED if value is None else three_digits(value / unit.size) for value in values]
    return f"{name}, {word}" if word else name, cells


def _by_columns(columns: Sequence[tuple[str, Sequence[str]]]) -> tuple[list[Markup], list[list[Markup]]]:
    """Return the heads of the columns, and their cells by row."""
    heads = [text(name) for name, _ in columns]
    return heads, [_cells(*row) for row in zip(*(cells for _, cells in columns), strict=True)]


def runs_table(runs: Sequence[RunHistory]) -> Markup:
    ends = [run.end for run in runs]
    heads, cells = _by_columns((
        ("perplexity at the end", [perplexity(final(run)) for run in runs]),
        ("best", [perplexity(best(run)) for run in runs]),
        ("stages, L", [_lengths(run) for run in runs]),
        ("steps", [f"{end.step:,}" for end in ends]),
        in_one_unit("tokens", COUNT, [end.tokens for end in ends]),
        in_one_unit("time", TIME, [end.seconds for end in ends]),
        in_one_unit("work", FLOPS, [end.flops for end in ends]),
    ))  # fmt: skip
    apart = differences(runs)
    rows = []
    for number, run in enumerate(runs, start=1):
        words = tag("td", text(_named(apart, number - 1)), class_="words")
        rows.append((run_name(number, run), [*cells[number - 1], words]))
    head = [text("run"), *heads, tag("span", text("differs in"), class_="words")]
    return table("Held-out perplexity, and what it took", head, rows)


def facts_table(runs: Sequence[RunHistory]) -> Markup:
    facts = [run.facts for run in runs]
    heads, cells = _by_columns((
        ("state", [fact.state for fact in facts]),
        ("began, UTC", [fact.began for fact in facts]),
        ("parameters", [fact.parameters for fact in facts]),
        ("corpus", [fact.corpus for fact in facts]),
        ("ranks", [fact.ranks for fact in facts]),
        ("precision", [fact.precision for fact in facts]),
        ("commit", [fact.commit for fact in facts]),
    ))  # fmt: skip
    names = (run_name(number, run) for number, run in enumerate(runs, start=1))
    rows = list(zip(names, cells, strict=True))
    return tag("div", table("What was run", [text("run"), *heads], rows), class_="wrapped facts")


def perplexity(valid: HeldOut | None) -> str:
    return NOT_RECORDED if valid is None or valid.perplexity is None else perplexity_text(valid.perplexity)


def _lengths(run: RunHistory) -> str:
    return ", ".join(stage.label.removeprefix("L=") for stage in run.stages) or NOT_RECORDED


def _named(apart: Sequence[Difference], index: int) -> str:
    """Return the settings that differ, without those of the output, and with one word for the stages, whose lengths
    are in the row."""
    named = [row for row in apart if not row.key.startswith(("output.", "stages."))]
    words = ["stages"] if any(row.key.startswith("stages.") for row in apart) else []
    words += [f"{row.key} {row.values[index] or 'not set'}" for row in named[:_MOST_NAMED]]
    rest = len(named) - _MOST_NAMED
    return ", ".join(words + ([f"and {rest} more"] if rest > 0 else [])) or "nothing"


def stages_table(runs: Sequence[RunHistory]) -> Markup:
    found = [(number, run, stage) for number, run in enumerate(runs, start=1) for stage in stage_figures(run)]
    stages = [stage for _, _, stage in found]
    heads, cells = _by_columns((
        ("cache", [_whole(stage.cache_length) for stage in stages]),
        ("steps", [_whole(stage.steps) for stage in stages]),
        in_one_unit("tokens", COUNT, [stage.tokens for stage in stages]),
        in_one_unit("time", TIME, [stage.seconds for stage in stages]),
        ("tokens per second", [_whole(stage.tokens_per_second) for stage in stages]),
        in_one_unit("speed", FLOPS_PER_SECOND, [stage.flops_per_second for stage in stages]),
        in_one_unit("peak memory", MEMORY, [stage.memory_bytes for stage in stages]),
    ))  # fmt: skip
    several = len(runs) > 1
    names = (
        join((run_name(number, run), text(f", {stage.label}"))) if several else text(stage.label)
        for number, run, stage in found
    )
    about = "What each stage took; memory is that of the first rank"
    return table(about, [text("stage"), *heads], list(zip(names, cells, strict=True)))


def _whole(number: float | None) -> str:
    return NOT_RECORDED if number is None else f"{number:,.0f}"


def match_tables(runs: Sequence[RunHistory]) -> Markup:
    """Return the table for the runs' last held-out losses, and one for their best losses if these differ."""
    tables = [_match_table(runs, final, "last")]
    if any(final(run) != best(run) for run in runs):
        tables.append(_match_table(runs, best, "best"))
    return join(tables)


def _match_table(runs: Sequence[RunHistory], goal: Callable[[RunHistory], HeldOut | None], word: str) -> Markup:
    goals = [(run, valid) for run in runs if (valid := goal(run)) is not None]
    heads = (join((text(run.name), tag("br"), text(f"{loss_of(valid):.4f} nats"))) for run, valid in goals)
    head = [text("run"), *heads]
    rows = []
    for number, run in enumerate(runs, start=1):
        cells = [_match_cell(run, other, loss_of(valid)) for other, valid in goals]
        rows.append((run_name(number, run), cells))
    return table(f"What the run of a row needed to match the {word} held-out loss of the run above", head, rows)


def _match_cell(run: RunHistory, other: RunHistory, goal: float) -> Markup:
    if not compares(run, other):
        return tag("td", text("other text"))
    ours = match(run, goal)
    theirs = match(other, goal)
    if ours is None or theirs is None:
        return tag("td", text("-"))
    bound = text("at most " if ours.at_most else "")
    time = [bound, tag("b", text(TIME.text(ours.seconds)))]
    tokens = [bound, text(f"{COUNT.text(ours.tokens)} tokens")]
    if run is not other:
        time.append(_ratio(ours.seconds, theirs.seconds))
        tokens.append(_ratio(ours.tokens, theirs.tokens))
    return tag("td", *time, tag("br"), *tokens)


def _ratio(ours: float | None, theirs: float | None) -> Markup:
    if ours is None or not theirs:
        return Markup("")
    return tag("small", Markup(f" {ours / theirs:.2f}&times;"))


def differences_table(runs: Sequence[RunHistory]) -> Markup:
    rows = []
    for row in differences(runs):
        values = ("not set" if value is None else value for value in row.values)
        rows.append((breakable(row.key), [tag("td", breakable(value)) for value in values]))
    head = [text("key"), *(run_name(number, run) for number, run in enumerate(runs, start=1))]
    return tag("div", table("Keys whose values differ between the run files", head, rows), class_="wrapped")
