"""The page: one self-contained HTML file."""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from megatron_style.base.run_folder import RUN_FILE
from megatron_style.base.units import COUNT, FLOPS, TIME
from megatron_style.reporting import charts
from megatron_style.reporting.bars import draw_bars
from megatron_style.reporting.comparison import best, by_text, differences, final, scatter, stage_figures
from megatron_style.reporting.history import RunHistory, Sample
from megatron_style.reporting.markup import Markup, join, tag, text
from megatron_style.reporting.style import style_sheet
from megatron_style.reporting.svg import Chart, draw
from megatron_style.reporting.tables import (
    differences_table,
    facts_table,
    match_tables,
    perplexity,
    run_name,
    runs_table,
    stages_table,
)

_GENERATOR = "megatron_style.report"
_TOKEN_DEVIATION = 3.0  # nats; of the losses of single tokens, in models of text
_STANDS_OUT = 1.1  # times the fastest rank: a slower one is named


def is_page(path: Path) -> bool:
    """True if the file is a page written here, which a new one may replace."""
    try:
        with path.open("rb") as file:
            return f'content="{_GENERATOR}"'.encode() in file.read(1000)
    except OSError:
        return False


def page(runs: Sequence[RunHistory]) -> str:
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="generator", content=_GENERATOR),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", text(_names(runs))),
        tag("style", Markup(style_sheet())),
    )
    several = len(runs) > 1
    title = tag("h1", text(f"{len(runs)} runs compared" if several else runs[0].name))
    seeds = _remark("Each row is one run: how much its result varies with the seed is not known from it.")
    summary = join((_other_texts(runs), runs_table(runs), seeds)) if several else _figures(runs[0])
    parts = [title, summary, facts_table(runs), _curves(runs), _position(runs), _stages(runs), _ranks(runs)]
    parts += [_matches(runs), _differences(runs)] if several else []
    body = tag("body", tag("main", *parts, _samples(runs), _run_files(runs)))
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"


def _section(title: str, *inside: Markup, style: str = "") -> Markup:
    return tag("section", tag("h2", text(title)), *inside, class_=style or False)


def _remark(words: str) -> Markup:
    return tag("p", text(words), class_="remark")


def _other_texts(runs: Sequence[RunHistory]) -> Markup:
    """Return warnings about losses and perplexities that are not, or may not be, comparable."""
    groups = by_text(runs)
    unknown = _names(groups.pop("", []))
    remarks = []
    if len(groups) > 1:
        same = "; ".join(map(_names, groups.values()))
        remarks.append(
            f"Warning: the losses and perplexities of these runs are not comparable, because they were measured on "
            f"different held-out text or with different vocabularies. Measured on the same: {same}."
        )
    if unknown and len(runs) > 1:
        remarks.append(f"Not recorded: the held-out text of {unknown}. Losses are comparable only on the same text.")
    return join(tag("p", text(words), class_="warning", role="note") for words in remarks)


def _names(runs: Sequence[RunHistory]) -> str:
    return ", ".join(run.name for run in runs)


def _figures(run: RunHistory) -> Markup:
    """Return the main figures of a single run, in large type."""
    end = run.end
    lowest = best(run)
    at_best = f"best {perplexity(lowest)}, step {lowest.at.step:,}" if lowest else "no validation yet"
    rates = [stage.tokens_per_second for stage in stage_figures(run) if stage.tokens_per_second is not None]
    speed = COUNT.text(rates[-1] if rates else None)
    shown = [
        ("held-out perplexity", perplexity(final(run)), at_best),
        ("tokens", COUNT.text(end.tokens), f"{end.step:,} steps"),
        ("time of training", TIME.text(end.seconds), "without validation and saving"),
        ("model FLOPs", FLOPS.text(end.flops), "over all ranks"),
        ("tokens per second", speed, "in the last stage"),
    ]
    if run.saves:
        stall = sum(save.stall for save in run.saves)
        write = sum(save.write for save in run.saves)
        note = f"{len(run.saves):,} checkpoints, written in {TIME.text(write)}"
        shown.append(("stopped for saving", TIME.text(stall), note))
    cells = (
        tag("div", tag("dt", text(name)), tag("dd", text(value), tag("small", text(note))))
        for name, value, note in shown
    )
    return tag("dl", *cells, class_="figures")


def _curves(runs: Sequence[RunHistory]) -> Markup:
    known = [along for along in charts.ALONG if any(charts.recorded(along, run) for run in runs)]
    drawn = {along: charts.curves(runs, along) for along in known}
    drawn = {along: figures for along, figures in drawn.items() if figures}
    if not drawn:
        return _section("Curves", _remark("No step has been recorded yet."))
    choices = join(
        join((tag("input", type="radio", name="along", id=f"along-{along.key}", checked=along == next(iter(drawn))),
              tag("label", text(along.label), for_=f"along-{along.key}")))
        for along in drawn
    )  # fmt: skip
    switch = tag("fieldset", tag("legend", text("against")), choices) if len(drawn) > 1 else Markup("")
    sheets = (tag("div", *map(_figure, figures), class_=f"charts by-{along.key}") for along, figures in drawn.items())
    remarks = join((_noise(runs), _not_recorded(runs)))
    return _section("Curves", _other_texts(runs), switch, _legend(runs), *sheets, remarks, style="curves")


def _noise(runs: Sequence[RunHistory]) -> Markup:
    """Return a remark on how much of a curve is chance."""
    found = {run.name: scatter([event.loss for event in run.trained]) for run in runs}
    known = {name: spread for name, spread in found.items() if spread is not None}
    if not known:
        return Markup("")
    amounts = ", ".join(f"{spread:.2g}{f' ({name})' if len(runs) > 1 else ''}" for name, spread in known.items())
    return _remark(
        f"A training point is the loss of a single batch, which scatters by about {amounts} nats: smaller ups and "
        "downs are chance. Every held-out point is measured on the same text."
    )


def _not_recorded(runs: Sequence[RunHistory]) -> Markup:
    words = []
    for along in charts.ALONG:
        lacking = [run for run in runs if not charts.recorded(along, run)]
        if lacking:
            words.append(f"{along.label} by {_names(lacking)}")
    return _remark(f"Not recorded: {'; '.join(words)}.") if words else Markup("")


def _figure(chart: Chart) -> Markup:
    note = ", logarithmic" if chart.y.logarithmic else ""
    return tag("figure", tag("figcaption", text(chart.title + note)), draw(chart))


def _legend(runs: Sequence[RunHistory]) -> Markup:
    keys = [run_name(number, run) for number, run in enumerate(runs, start=1)] if len(runs) > 1 else []
    thin = tag("svg", tag("path", d="M0 5H32", class_="line training"), viewBox="0 0 32 10", aria_hidden="true")
    mark = tag("circle", cx="16", cy="5", r="3", class_="mark")
    thick = tag("svg", tag("path", d="M0 5H32", class_="line"), mark, viewBox="0 0 32 10", aria_hidden="true")
    kinds = [join((thick, text("held-out"))), join((thin, text("training")))]
    return tag("ul", *(tag("li", entry) for entry in [*keys, *kinds]), class_="legend")


def _position(runs: Sequence[RunHistory]) -> Markup:
    chart = charts.by_position(runs)
    if chart is None:
        return Markup("")
    words = _remark(
        "The last validation of each run; dashed lines are the validations at the ends of its earlier stages. Without "
        "a cache the first tokens of a segment have the highest loss, because they have almost no context."
        + "".join(dict.fromkeys(map(_tokens_of_a_point, runs)))
    )
    return _section(
        "Loss by position in the segment", _other_texts(runs), tag("div", _figure(chart), words, class_="charts")
    )


def _tokens_of_a_point(run: RunHistory) -> str:
    """Return a sentence on the chance in a point, if it is on record on how many tokens it was measured."""
    last = run.held_out[-1] if run.held_out else None
    if last is None or not last.by_position or not last.scored_tokens:
        return ""
    each = last.scored_tokens / len(last.by_position)
    chance = 2 * _TOKEN_DEVIATION * (2 / each) ** 0.5
    return (
        f" A point is the mean of about {each:,.0f} tokens; where their losses have a standard deviation of "
        f"{_TOKEN_DEVIATION:g} nats, neighbours differ by up to {chance:.1g} nats by chance."
    )


def _stages(runs: Sequence[RunHistory]) -> Markup:
    if not any(run.stages for run in runs):
        return Markup("")
    drawn = (tag("figure", tag("figcaption", text(chart.title)), draw_bars(chart)) for chart in charts.speeds(runs))
    return _section("Stages: speed and memory", tag("div", *drawn, class_="charts small"), stages_table(runs))


def _ranks(runs: Sequence[RunHistory]) -> Markup:
    drawn = (charts.rank_times(runs, along) for along in charts.ALONG)
    chart = next((chart for chart in drawn if chart is not None), None)
    if chart is None:
        return Markup("")
    words = "Own work is reading and forward passes, in which a rank waits for no other. Dashed: the fastest rank."
    sentences = (tag("p", text(_straggler(run))) for run in runs if run.rank_times)
    return _section("Ranks", *sentences, tag("div", _figure(chart), _remark(words), class_="charts"))


def _straggler(run: RunHistory) -> str:
    """Return a sentence about the rank that was the slowest most often, unless that is chance: of two equal ranks one
    is always the slower one, in half of the records."""
    slowest = Counter(slow.rank for _, slow, _ in run.rank_times)
    (rank, times), *others = slowest.most_common(2)
    ratios = [slow.seconds / fast.seconds for _, slow, fast in run.rank_times if fast.seconds > 0]
    ratio = statistics.median(ratios) if ratios else math.nan
    took = f"the own work of the slowest rank took {ratio:.2f} times the fastest one's, in the median"
    if ratio < _STANDS_OUT or any(times < 2 * often for _, often in others):
        return f"{run.name}: no rank stands out; {took}."
    return f"{run.name}: rank {rank} was the slowest in {times / len(run.rank_times):.0%} of the records; {took}."


def _matches(runs: Sequence[RunHistory]) -> Markup:
    if all(final(run) is None for run in runs):
        return Markup("")
    words = _remark(
        "Between two validations the loss is interpolated linearly. Below 1: reached the loss faster than the run "
        "named in the column. A dash: never reached it. At most: the run's first validation was already better. "
        "Other text: the two runs are not comparable."
    )
    return _section("Time and tokens to match", _other_texts(runs), words, match_tables(runs))


def _differences(runs: Sequence[RunHistory]) -> Markup:
    found = differences_table(runs) if differences(runs) else _remark("The run files are the same.")
    return _section("What differs", found)


def _samples(runs: Sequence[RunHistory]) -> Markup:
    sampled = [run for run in runs if run.samples]
    return _section("Generated text", *map(_run_samples, sampled), style="folded") if sampled else Markup("")


def _run_samples(run: RunHistory) -> Markup:
    """Return the first, the middle and the last sample, with all samples in a nested fold."""
    samples = run.samples
    chosen = [samples[index] for index in sorted({0, len(samples) // 2, len(samples) - 1})]
    rest = tag("details", tag("summary", text(f"all {len(samples)}")), *map(_sample, samples))
    inside = [*map(_sample, chosen), *([rest] if len(samples) > len(chosen) else [])]
    steps = ", ".join(f"{sample.at.step:,}" for sample in chosen)
    return tag("details", tag("summary", text(f"{run.name}: after step {steps}")), *inside)


def _sample(sample: Sample) -> Markup:
    """Return a sample. Early in training it may be nothing but line ends, which are counted instead of shown."""
    head = _remark(f"step {sample.at.step:,}, after {COUNT.text(sample.at.tokens)} tokens")
    shown = re.sub(r"\n{3,}", lambda ends: f"\n[{len(ends[0])} line ends]\n", sample.text)
    return join((head, tag("blockquote", tag("b", text(sample.prompt)), text(f" {shown.strip()}"))))


def _run_files(runs: Sequence[RunHistory]) -> Markup:
    files = (
        tag("details", tag("summary", text(f"{run.name}: {RUN_FILE}")), tag("pre", text(run.run_file))) for run in runs
    )
    return _section("Run files", *files, style="folded")
