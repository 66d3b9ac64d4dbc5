"""`report` as users run it: one page that needs nothing else."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from megatron_style.report import main
from tests.support.tiny import Done, content, expect_refusal, run_here


def write_run(folder: Path, *, steps: int = 5, held_out: bool = True) -> Path:
    """What a run of two stages leaves behind."""
    events: list[dict[str, object]] = []
    for step in range(steps):
        if step in (0, 3):
            events.append({"kind": "stage", "step": step, "segment_length": 8 + step, "tokens": step * 1000})
        events.append(
            {"kind": "train", "step": step + 1, "loss": 5 - step / 2, "tokens": (step + 1) * 1000,
             "tokens_per_second": 100.0 + step}
        )  # fmt: skip
        if held_out:
            tokens = (step + 1) * 1000
            events.append(
                {"kind": "valid", "step": step + 1, "loss": 4.0, "perplexity": 60.25 - step, "tokens": tokens}
            )
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    (folder / "run.yaml").write_text(f"model:\n  layers: 3  # {folder.name}\n")
    return folder


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

    def handle_data(self, data: str) -> None:
        self.text += data


def report(*argv: object) -> Done:
    return run_here(main, *argv)


def page_of(folder: Path, *runs: Path) -> Page:
    done = report(*runs, "--output", folder / "report.html")
    assert (done.code, done.err) == (0, "")
    return Page((folder / "report.html").read_text(encoding="utf-8"))


def test_a_run_becomes_a_page_with_its_numbers_charts_and_settings(tmp_path: Path) -> None:
    page = page_of(tmp_path, write_run(tmp_path / "first"))
    for words in ("first", "5,000", "56.25", "102", "layers: 3"):
        assert words in page.text
    assert page.tags.count("svg") == 2


def test_the_page_loads_nothing(tmp_path: Path) -> None:
    page = page_of(tmp_path, write_run(tmp_path / "first"), write_run(tmp_path / "second"))
    assert not {"script", "link", "img", "iframe", "object", "embed", "image"} & set(page.tags)
    for name, value in page.attributes:
        if name in ("src", "href", "xlink:href"):
            assert value.startswith("#"), value
    without_namespaces = re.sub(r'xmlns(:\w+)?="[^"]*"', "", page.source)
    assert not re.search(r"https?://|@import|url\((?!#)", without_namespaces)


def test_several_runs_share_the_page(tmp_path: Path) -> None:
    page = page_of(tmp_path, *(write_run(tmp_path / name, steps=n) for n, name in enumerate(("a1", "b2", "c3"), 2)))
    for name in ("a1", "b2", "c3"):
        assert f"<td>{name}</td>" in page.source
        assert f"# {name}" in page.text
    assert page.tags.count("svg") == 2


def test_runs_of_the_same_name_are_kept_apart(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / "x" / "run", steps=2), write_run(tmp_path / "y" / "run", steps=4)]
    page = page_of(tmp_path, *runs)
    for run, tokens in zip(runs, ("2,000", "4,000"), strict=True):
        assert f"<td>{run}</td>" in page.source
        assert tokens in page.text


def test_the_folder_one_is_in_has_a_name_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(write_run(tmp_path / "first"))
    assert "<td>first</td>" in page_of(tmp_path, Path()).source


def test_a_run_without_held_out_text_has_a_page(tmp_path: Path) -> None:
    page = page_of(tmp_path, write_run(tmp_path / "first", held_out=False))
    assert "5,000" in page.text


def test_a_run_that_has_just_begun_has_a_page(tmp_path: Path) -> None:
    page = page_of(tmp_path, write_run(tmp_path / "first", steps=0))
    assert "<td>first</td><td>0</td>" in page.source


def test_a_last_line_that_a_kill_tore_is_skipped(tmp_path: Path) -> None:
    run = write_run(tmp_path / "first")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')
    assert "5,000" in page_of(tmp_path, run).text


@pytest.mark.parametrize("name", ["<script>alert(1)<", "a&b", "$x_{$", '"quoted"', "{title}", "größer"])
def test_names_and_settings_are_text_and_nothing_else(tmp_path: Path, name: str) -> None:
    run = write_run(tmp_path / name)
    (run / "run.yaml").write_text("data: '<img src=x>'")
    page = page_of(tmp_path, run)
    assert not {"script", "img"} & set(page.tags)
    assert page.text.count(name) >= 3  # in the title, the table and above the settings
    assert "<img src=x>" in page.text


def test_the_result_is_one_json_object(tmp_path: Path) -> None:
    done = report(write_run(tmp_path / "first"), "--output", tmp_path / "page.html", "--json")
    assert json.loads(done.out) == {"output": str(tmp_path / "page.html"), "runs": 1}


def test_bad_input_is_named_in_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    run = write_run(tmp_path / "first")
    (tmp_path / "empty").mkdir()
    (write_run(tmp_path / "torn") / "metrics.jsonl").write_text('{"kind": "train"\n')
    (write_run(tmp_path / "unset") / "run.yaml").unlink()
    before = content(tmp_path)
    output = ["--output", tmp_path / "report.html"]
    expect_refusal(
        report(run, tmp_path / "no", *output), tmp_path / "no", "no metrics.jsonl in it; the folder of a run"
    )
    expect_refusal(report(tmp_path / "empty", *output), "empty: no metrics.jsonl in it; the folder of a run")
    expect_refusal(report(tmp_path / "unset", *output), "unset: no run.yaml in it; the folder of a run")
    expect_refusal(report(tmp_path / "torn", *output), 'metrics.jsonl:1: holds \'{"kind": "train"\'; expected')
    expect_refusal(report(run, "--output", tmp_path / "no" / "report.html"), "--output", "in a folder that exists")
    expect_refusal(report(run, "--output", tmp_path / "empty"), "--output", "must be a file")
    assert content(tmp_path) == before
