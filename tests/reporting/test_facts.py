"""What a run is called, what it is and how it ended."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_style.base.launches import Launch, append_launch, read_launches
from megatron_style.reporting.facts import Facts, read_facts, short_names

LAUNCH = Launch(
    step=0, began="2026-03-01T10:00:00+00:00", parameters=1_070_000, corpus_tokens=2_310_000, total_steps=100,
    data=4, tensor=2, zero=1, precision="bf16", device="H100", commit="abc",
)  # fmt: skip
SETTINGS = {"data.train": "data/sotu/train"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "metrics.jsonl").touch()
    return tmp_path


def launched(folder: Path, *launches: Launch) -> Path:
    for launch in launches or (LAUNCH,):
        append_launch(folder / "launches.jsonl", launch)
    return folder


def status(folder: Path, **values: object) -> None:
    (folder / "status.json").write_text(json.dumps(values))


def test_the_facts_are_those_of_the_last_launch_and_the_date_that_of_the_first(folder: Path) -> None:
    status(folder, state="finished", step=100, time="2026-03-02T10:00:00+00:00")
    first = Launch(step=0, began="2026-02-01T09:30:00+00:00", precision="fp32")
    launched(folder, first, LAUNCH)
    assert read_facts(folder, SETTINGS, last_step=100) == Facts(
        state="finished", began="2026-02-01 09:30", parameters="1.07M", corpus="sotu, 2.31M tokens",
        ranks="8 (4 data x 2 tensor), H100", precision="bf16, ZeRO 1", commit="abc",
    )  # fmt: skip


def test_a_blend_names_its_sources(folder: Path) -> None:
    settings = {"data.train.0.path": "x/web/train", "data.train.0.weight": "3", "data.train.1.path": "x/books/train"}
    assert read_facts(launched(folder), settings, last_step=1).corpus == "web + books, 2.31M tokens"


@pytest.mark.parametrize("state", ["stopped", "diverged", "failed"])
def test_a_run_that_did_not_finish_says_where_it_ended(folder: Path, state: str) -> None:
    status(folder, state=state, step=40, time="2026-03-02T10:00:00+00:00")
    assert read_facts(launched(folder), SETTINGS, last_step=40).state == f"{state} at step 40 of 100"


@pytest.mark.parametrize(
    "content",
    [
        '{"state": "finished", "step": 100, "time": "2026-02-28T10:00:00+00:00"}',  # of the launch before
        '{"state": "asleep", "step": 100, "time": "2027"}',
        '{"state": "finished"}',
        "[]",
        "{",
        "",
    ],
)
def test_without_an_end_of_its_own_a_launch_has_not_ended(folder: Path, content: str) -> None:
    (folder / "status.json").write_text(content)
    state = read_facts(launched(folder), SETTINGS, last_step=40).state
    assert state.startswith("not ended: step 40 of 100, last record 20")


def test_what_an_older_run_did_not_record_is_a_dash(folder: Path) -> None:
    facts = read_facts(folder, {}, last_step=0)
    assert {facts.began, facts.parameters, facts.corpus, facts.ranks, facts.precision, facts.commit} == {"-"}


def test_launches_are_read_as_they_were_written_and_damaged_ones_without_what_is_damaged(folder: Path) -> None:
    launched(folder)
    with (folder / "launches.jsonl").open("a") as file:
        file.write('[1]\n{"data": "many", "tensor": 2, "zero": true, "began": 5, "more": 1}\n{"step": 7')
    assert read_launches(folder / "launches.jsonl") == [LAUNCH, Launch(tensor=2)]


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["/r/one"], ["one"]),
        (["/r/one", "/r/two"], ["one", "two"]),
        (["/r/a/run", "/r/b/run", "/r/c"], ["a/run", "b/run", "c"]),
        (["/r/run", "/r/run/run"], ["r/run", "run/run"]),
        (["/r/a_run_with_a_name_that_has_many_words"], ["a_run_with_a_n…as_many_words"]),
        (
            [
                "/r/a_run_with_a_name_1_and_then_many_more",
                "/r/a_run_with_a_name_2_and_then_many_more",
            ],
            [
                "a_run_with_a_name_1_and_then_many_more",
                "a_run_with_a_name_2_and_then_many_more",
            ],
        ),
    ],
)
def test_names_are_as_short_as_they_can_be_and_differ(paths: list[str], names: list[str]) -> None:
    assert short_names([Path(path) for path in paths]) == names
