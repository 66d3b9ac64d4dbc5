"""`report` as users run it: one page that needs nothing else."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from megatron_style.report import main
from tests.support.tiny import Done, content, expect_refusal, run_here
from tests.support.written_runs import WrittenRun, WrittenStage, write_run

CURVES = ("loss", "perplexity", "rate", "norm")
OTHERS = {"position", "speed", "work", "memory"}


SMALL = WrittenRun(
    (WrittenStage(8, 6, 500), WrittenStage(16, 4, 400)), log_every=1, evaluate_every=2, tokens_per_batch=1000
)
JUST_BEGUN = WrittenRun(())


class Page(HTMLParser):
    """The tags of a page, their attributes, and its text."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.source, self.text = source, ""
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.feed(source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    @property
    def charts(self) -> set[str]:
        return {
            value.removesuffix("-desc") for name, value in self.attributes if name == "id" and value.endswith("-desc")
        }

    def handle_data(self, data: str) -> None:
        self.text += data


def keep_lines(run: Path, wanted: Callable[[dict[str, Any]], bool]) -> None:
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(line for line in lines if wanted(json.loads(line))))


def report(*argv: object) -> Done:
    return run_here(main, *argv)


def page_of(folder: Path, *runs: Path) -> Page:
    done = report(*runs, "--output", folder / "report.html")
    assert (done.code, done.err) == (0, "")
    return Page((folder / "report.html").read_text(encoding="utf-8"))


def test_a_run_becomes_a_page_with_its_numbers_charts_text_and_settings(tmp_path: Path) -> None:
    page = page_of(tmp_path, write_run(tmp_path / "first", SMALL))
    for words in ("first", "10 steps", "L=16", "layers: 16", "The people"):
        assert words in page.text
    assert page.charts == {f"{name}-by-{along}" for name in CURVES for along in ("tokens", "time", "flops")} | OTHERS


def test_a_run_with_several_ranks_names_the_one_that_was_slow(tmp_path: Path) -> None:
    page = page_of(tmp_path, write_run(tmp_path / "shared", replace(SMALL, slow_rank=5)))
    assert "ranks-by-tokens" in page.charts
    assert "shared: rank 5 was the slowest in 100% of the records" in page.text
    assert re.search(r"took 1\.(8|9)\d times the fastest one's", page.text)


def test_the_page_loads_nothing(tmp_path: Path) -> None:
    page = page_of(tmp_path, write_run(tmp_path / "first", SMALL), write_run(tmp_path / "second", SMALL))
    assert not {"script", "link", "img", "iframe", "object", "embed", "image"} & set(page.tags)
    for name, value in page.attributes:
        if name in ("src", "href", "xlink:href"):
            assert value.startswith("#"), value
    assert not re.search(r"https?://|@import|url\((?!#)", page.source)


def test_names_of_places_on_the_page_are_unique(tmp_path: Path) -> None:
    page = page_of(tmp_path, write_run(tmp_path / "first", SMALL), write_run(tmp_path / "second", SMALL))
    ids = [value for name, value in page.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    for name, value in page.attributes:
        if name in ("aria-labelledby", "for"):
            assert set(value.split()) <= set(ids)


def test_several_runs_are_compared(tmp_path: Path) -> None:
    """The second run is the first, twice as slow: all it needs is twice the time."""
    slow = replace(
        SMALL, stages=[replace(stage, tokens_per_second=stage.tokens_per_second / 2) for stage in SMALL.stages]
    )
    page = page_of(tmp_path, write_run(tmp_path / "quick", SMALL), write_run(tmp_path / "slow", slow))
    assert "2 runs compared" in page.text
    assert "Time and tokens to match" in page.text
    ratios = re.findall(r"<small> ([0-9.]+)&times;</small>", page.source)
    tables = page.text.count("held-out loss of the run above")
    assert sorted(ratios) == sorted(["0.50", "1.00", "1.00", "2.00"] * tables)  # time and tokens, there and back
    assert "output.path" in page.text  # the one setting that differs
    assert "model.layers" not in page.text


def test_runs_on_other_text_are_not_compared_without_a_warning(tmp_path: Path) -> None:
    """The three curves, tables and charts that show losses each say so, and no ratio is made of a pair that differs."""
    digests = {"one": "aa", "two": "aa", "other": "bb"}
    runs = [write_run(tmp_path / name, replace(SMALL, text_digest=digest)) for name, digest in digests.items()]
    page = page_of(tmp_path, *runs)
    assert page.text.count("are not comparable, because they were measured on different held-out text") == 4
    assert "Measured on the same: one, two; other." in page.text
    tables = page.text.count("held-out loss of the run above")
    assert page.text.count("other text") == 4 * tables  # one-other and two-other, there and back
    assert page.source.count("&times;</small>") == 4 * tables  # one-two, there and back, time and tokens

    alike = page_of(tmp_path, *runs[:2])
    assert "warning" not in [value for name, value in alike.attributes if name == "class"]
    alone = page_of(tmp_path, runs[2])
    assert "warning" not in [value for name, value in alone.attributes if name == "class"]


def test_runs_that_did_not_record_their_text_are_named(tmp_path: Path) -> None:
    old, new = write_run(tmp_path / "old", SMALL), write_run(tmp_path / "new", replace(SMALL, text_digest="aa"))
    page = page_of(tmp_path, old, new)
    assert "Not recorded: the held-out text of old." in page.text
    assert "are not comparable, because" not in page.text


def test_up_to_eight_runs_share_the_page_and_more_are_refused(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / f"run {number}", replace(SMALL, seed=number)) for number in range(9)]
    page = page_of(tmp_path, *runs[:8])
    assert page.source.count('class="line run-8 held-out"') == 7  # loss and perplexity three times, and by position
    expect_refusal(report(*runs, "--output", tmp_path / "more.html"), "9 runs are given; a page compares 8 at most")


def test_runs_of_the_same_name_are_kept_apart(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / parent / "run", SMALL) for parent in "xy"]
    page = page_of(tmp_path, *runs)
    for name in ("x/run", "y/run"):
        assert name in page.text


def test_the_folder_one_is_in_has_a_name_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(write_run(tmp_path / "first", SMALL))
    assert "<h1>first</h1>" in page_of(tmp_path, Path()).source


def test_a_run_without_held_out_text_has_a_page(tmp_path: Path) -> None:
    run = write_run(tmp_path / "first", SMALL)
    keep_lines(run, lambda event: event["kind"] != "valid")
    page = page_of(tmp_path, run)
    assert "no validation yet" in page.text
    assert "loss-by-tokens" in page.charts


def test_a_run_with_one_validation_has_a_page(tmp_path: Path) -> None:
    run = write_run(tmp_path / "first", SMALL)
    keep_lines(run, lambda event: event["kind"] != "valid" or event["step"] == 10)
    page = page_of(tmp_path, run, write_run(tmp_path / "second", SMALL))
    assert page.charts >= OTHERS


@pytest.mark.parametrize("also", [False, True])
def test_a_run_that_has_just_begun_has_a_page(tmp_path: Path, also: bool) -> None:
    runs = [write_run(tmp_path / "first", JUST_BEGUN), *([write_run(tmp_path / "second", SMALL)] if also else [])]
    page = page_of(tmp_path, *runs)
    assert bool(page.charts) == also
    assert ("No step has been recorded yet." in page.text) != also


def test_a_stage_that_has_just_opened_has_a_page(tmp_path: Path) -> None:
    run = write_run(tmp_path / "first", SMALL)
    keep_lines(run, lambda event: event["step"] <= 6 or event["kind"] == "stage")
    assert "L=16" in page_of(tmp_path, run).text


def test_an_older_run_has_what_it_recorded(tmp_path: Path) -> None:
    lacking = ("seconds", "flops", "by_position", "memory_bytes", "cache_length")
    page = page_of(tmp_path, write_run(tmp_path / "first", SMALL, without=lacking))
    assert page.charts == {f"{name}-by-tokens" for name in CURVES} | {"speed"}
    assert "Not recorded: time by first; FLOPs by first." in page.text


def test_losses_that_are_not_finite_are_gaps(tmp_path: Path) -> None:
    run = write_run(tmp_path / "first", SMALL)
    for number in ("NaN", "Infinity"):
        text = (run / "metrics.jsonl").read_text()
        (run / "metrics.jsonl").write_text(re.sub(r'("step": [35], "loss": )[^,]*', rf"\g<1>{number}", text))
        source = page_of(tmp_path, run).source
        line = re.search(r'<path d="([^"]*)" class="line run-1 training">', source)
        assert line is not None
        assert line[1].count("M") == 3
        assert not re.search(r'[" ](nan|inf)', source)


def test_a_last_line_that_a_kill_tore_is_skipped(tmp_path: Path) -> None:
    run = write_run(tmp_path / "first", SMALL)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')
    assert "10 steps" in page_of(tmp_path, run).text


def test_long_runs_have_lines_of_at_most_600_points(tmp_path: Path) -> None:
    long = WrittenRun((WrittenStage(8, 5000, 500),), log_every=1, evaluate_every=1000)
    lines = re.findall(r'<path d="([^"]*)" class="line', page_of(tmp_path, write_run(tmp_path / "x", long)).source)
    assert 300 < max(line.count("L") + line.count("M") for line in lines) <= 600


def test_many_line_ends_in_a_sample_are_counted(tmp_path: Path) -> None:
    run = write_run(tmp_path / "first", SMALL)
    event = {"kind": "sample", "step": 10, "tokens": 9, "prompt": "Yes", "text": " and no\n\n so" + "\n" * 40}
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(event) + "\n")
    assert "Yes and no\n\n so\n[40 line ends]" in page_of(tmp_path, run).text


@pytest.mark.parametrize("name", ["<script>alert(1)<", "a&b", "$x_{$", '"quoted"', "{title}", "größer"])
def test_names_settings_and_samples_are_text_and_nothing_else(tmp_path: Path, name: str) -> None:
    run = write_run(tmp_path / name, SMALL)
    (run / "run.yaml").write_text("data: '<img src=x>'")
    page = page_of(tmp_path, run, write_run(tmp_path / "other", SMALL))
    assert not {"script", "img"} & set(page.tags)
    assert page.text.count(name) >= 5  # in the title, the tables and above the settings
    assert "<img src=x>" in page.text
    assert "steps < & > the Congress" in page.text


def test_the_result_is_one_json_object(tmp_path: Path) -> None:
    done = report(write_run(tmp_path / "first", SMALL), "--output", tmp_path / "page.html", "--json")
    assert json.loads(done.out) == {"output": str(tmp_path / "page.html"), "runs": 1}


def test_bad_input_is_named_in_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    run = write_run(tmp_path / "first", SMALL)
    (tmp_path / "empty").mkdir()
    (write_run(tmp_path / "torn", SMALL) / "metrics.jsonl").write_text('{"kind": "train"\n')
    (write_run(tmp_path / "unset", SMALL) / "run.yaml").unlink()
    (write_run(tmp_path / "listed", SMALL) / "run.yaml").write_text("- 1")
    before = content(tmp_path)
    output = ["--output", tmp_path / "report.html"]
    expect_refusal(
        report(run, tmp_path / "no", *output), tmp_path / "no", "no metrics.jsonl in it; the folder of a run"
    )
    expect_refusal(report(tmp_path / "empty", *output), "empty: no metrics.jsonl in it; the folder of a run")
    expect_refusal(report(tmp_path / "unset", *output), "unset: no run.yaml in it; the folder of a run")
    expect_refusal(report(tmp_path / "listed", *output), "run.yaml: holds list, but sections")
    expect_refusal(report(tmp_path / "torn", *output), 'metrics.jsonl:1: holds \'{"kind": "train"\'; expected')
    expect_refusal(report(run, "--output", tmp_path / "no" / "report.html"), "--output", "in a folder that exists")
    expect_refusal(report(run, "--output", tmp_path / "empty"), "--output", "must be a file")
    expect_refusal(report(run, "--output", "/dev/full"), "--output /dev/full: cannot be written", "name another file")
    assert content(tmp_path) == before


def test_only_a_report_is_replaced(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", SMALL)
    other = tmp_path / "thesis.html"
    other.write_text("years of work")
    expect_refusal(run_here(main, run, "--output", other), "exists and is not a report; use --overwrite")
    assert other.read_text() == "years of work"
    assert run_here(main, run, "--output", other, "--overwrite").code == 0
    assert run_here(main, run, "--output", other).code == 0  # now it is one


def test_without_an_output_the_page_is_next_to_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("one", "two"):
        write_run(tmp_path / name, SMALL)
    monkeypatch.chdir(tmp_path)
    assert report("one").code == 0
    assert (tmp_path / "one" / "report.html").is_file()
    assert report("one", "two").code == 0
    assert (tmp_path / "report.html").is_file()
    expect_refusal(report("three"), "three")
