"""The page's tables. Each scrolls in its own box, so that the page itself never does."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megatron_style.base.units import COUNT, FLOPS, FLOPS_PER_SECOND, MEMORY, NOT_RECORDED, TIME
from megatron_style.reporting.comparison import Difference, best, compares, differences, final, loss_of, match
from megatron_style.reporting.history import HeldOut, RunHistory
from megatron_style.reporting.markup import Markup, join, tag, text
from megatron_style.reporting.stages import stage_figures

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
    return join((tag("span", class_=f"key run-{number}"), text(run.name)))


def runs_table(runs: Sequence[RunHistory]) -> Markup:
    names = ("run", "perplexity at the end", "best", "stages, L", "steps", "tokens", "time", "FLOPs")
    head = [*map(text, names), tag("span", text("differs in"), class_="words")]
    apart = differences(runs)
    rows = []
    for number, run in enumerate(runs, start=1):
        end = run.end
        cells = _cells(perplexity(final(run)), perplexity(best(run)), _lengths(run), f"{end.step:,}",
                       COUNT.text(end.tokens), TIME.text(end.seconds), FLOPS.text(end.flops))  # fmt: skip
        words = tag("td", text(_named(apart, number - 1)), class_="words")
        rows.append((run_name(number, run), [*cells, words]))
    return table("Held-out perplexity, and what it took", head, rows)


def perplexity(valid: HeldOut | None) -> str:
    return NOT_RECORDED if valid is None or valid.perplexity is None else f"{valid.perplexity:,.2f}"


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
    head = ["stage", "cache", "steps", "tokens", "time", "tokens per second", "FLOP/s", "peak memory"]
    rows = []
    for number, run in enumerate(runs, start=1):
        for stage in stage_figures(run):
            speed = NOT_RECORDED if stage.tokens_per_second is None else f"{stage.tokens_per_second:,.0f}"
            cache = NOT_RECORDED if stage.cache_length is None else f"{stage.cache_length:,}"
            cells = _cells(
                cache, f"{stage.steps:,}", COUNT.text(stage.tokens), TIME.text(stage.seconds), speed,
                FLOPS_PER_SECOND.text(stage.flops_per_second), MEMORY.text(stage.memory_bytes),
            )  # fmt: skip
            name = join((run_name(number, run), text(f", {stage.label}"))) if len(runs) > 1 else text(stage.label)
            rows.append((name, cells))
    return table("What each stage took; memory is that of the first rank", list(map(text, head)), rows)


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
        rows.append((text(row.key), _cells(*values)))
    head = [text("key"), *(run_name(number, run) for number, run in enumerate(runs, start=1))]
    return table("Keys whose values differ between the run files", head, rows)
