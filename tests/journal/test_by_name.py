"""The losses of sources and of named held-out texts are recorded, shown in TensorBoard and drawn in the report."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_style.base.events import SampleEvent, TrainEvent, ValidEvent, read_events
from megatron_style.base.run_folder import RunFolder
from megatron_style.config.run import RunConfig
from megatron_style.parallel.local_ranks import run_ranks
from megatron_style.reporting.history import read_runs
from megatron_style.reporting.page import page
from megatron_style.train import train
from tests.support.blends import SIZES, blend_in, with_data, write_blend
from tests.support.boards import board as board_of
from tests.support.resuming import make_run

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("blend")
    write_blend(path)
    return path


def trained(folder: Path, name: str, *, ranks: int, **valid: object) -> RunConfig:
    run = with_data(make_run(folder, name, data=ranks, steps=8, output={"evaluate_every": 4}), train=blend_in(folder))
    run = with_data(run, **valid) if valid else run
    run_ranks(ranks, train, run)
    return run


def test_losses_are_recorded_and_drawn_by_name(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    texts = {name: str(folder / name / "valid") for name in reversed(SIZES)}
    run = trained(folder, "named", ranks=2, valid=texts)
    lines = capfd.readouterr().err
    assert "stage 1: 24 rows: news 16 (66.7%; wanted 66.7%), books 8 (33.3%; wanted 33.3%)" in lines
    assert "held-out perplexity of news" in lines
    events = list(read_events(RunFolder(run.output.path).metrics))
    losses = [event for event in events if isinstance(event, TrainEvent)]
    evaluations = [event for event in events if isinstance(event, ValidEvent)]
    assert all(event.by_source and event.by_source.keys() == SIZES.keys() for event in losses)
    assert [(event.step, event.name, event.is_main) for event in evaluations] == [
        (4, "books", True), (4, "news", False), (8, "books", True), (8, "news", False),
    ]  # fmt: skip
    assert len({event.text_digest for event in evaluations}) == 2
    assert len([event for event in events if isinstance(event, SampleEvent)]) == 2  # of the main text only

    board = board_of(run)
    for name in SIZES:
        points = [point.value for point in board.Scalars(f"loss/train/{name}")]
        assert points == pytest.approx([event.by_source[name] for event in losses if event.by_source])
        held_out = [event.loss for event in evaluations if event.name == name]
        assert [point.value for point in board.Scalars(f"loss/valid/{name}")] == pytest.approx(held_out)
    main = [event.loss for event in evaluations if event.is_main]
    assert [point.value for point in board.Scalars("loss/valid")] == pytest.approx(main)

    (history,) = read_runs([run.output.path])
    assert [valid.loss for valid in history.held_out] == main
    drawn = page([history])
    for name in SIZES:
        assert f"Training loss on {name}" in drawn
        assert f"Held-out loss on {name}" in drawn


def test_a_name_changes_no_number(folder: Path) -> None:
    """The main text is evaluated as if it were the only one, and the training does not notice the others."""
    texts = {name: str(folder / name / "valid") for name in SIZES}
    several = trained(folder, "several", ranks=1, valid=texts)
    alone = trained(folder, "alone", ranks=1, valid=texts["news"])
    main = [
        [(event.loss, event.text_digest) for event in read_events(RunFolder(run.output.path).metrics)
         if isinstance(event, ValidEvent) and event.is_main is not False]
        for run in (several, alone)
    ]  # fmt: skip
    assert main[0] == main[1]
    losses = [
        [event.loss for event in read_events(RunFolder(run.output.path).metrics) if isinstance(event, TrainEvent)]
        for run in (several, alone)
    ]
    assert losses[0] == losses[1]
