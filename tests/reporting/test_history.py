"""A run's folder as values: complete, truncated, old, and with values that are not numbers."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from megatron_style.base.errors import UserError
from megatron_style.base.events import SaveEvent, line_of
from megatron_style.base.units import TIME
from megatron_style.reporting.comparison import stage_figures
from megatron_style.reporting.history import Place, read_run, read_runs
from megatron_style.reporting.page import page
from tests.support.written_runs import SHORTFORMER, WrittenRun, WrittenStage, write_run


def write_lines(folder: Path, *events: dict[str, object]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    (folder / "run.yaml").write_text("model: {layers: 3, cache: true, dropout: null}\nstages: [{steps: 5}]\n")
    return folder


def test_every_kind_of_event_is_read(tmp_path: Path) -> None:
    run = read_run("x", write_run(tmp_path / "x"))
    assert [stage.label for stage in run.stages] == ["L=128", "L=512"]
    assert (len(run.trained), len(run.held_out), len(run.samples)) == (200, 20, 20)
    assert run.end.step == 2000
    assert run.end.tokens == 2000 * 9216
    assert run.end.flops == 2000 * 9216 * SHORTFORMER.flops_per_token
    assert len(run.held_out[-1].by_position) == 16
    assert run.samples[0].prompt == "The people"


def test_what_an_older_run_did_not_record_is_none(tmp_path: Path) -> None:
    only = ({"kind": "train", "step": 1, "loss": 2.0, "tokens": 7}, {"kind": "valid", "step": 1, "loss": 2.0})
    run = read_run("x", write_lines(tmp_path / "x", *only))
    (trained,), (valid,) = run.trained, run.held_out
    assert (trained.grad_norm, trained.memory_bytes, trained.at) == (None, None, Place(1, 7.0))
    assert valid.perplexity == pytest.approx(math.exp(2))
    assert (valid.at.tokens, valid.by_position) == (None, ())


def test_losses_that_are_not_numbers_stay_so(tmp_path: Path) -> None:
    values = (math.nan, math.inf, None, "high")
    events = ({"kind": "valid", "step": 1, "loss": value, "tokens": 5} for value in values)
    losses = [valid.loss for valid in read_run("x", write_lines(tmp_path / "x", *events)).held_out]
    assert math.isnan(losses[0] or 0)
    assert losses[1:] == [math.inf, None, None]
    huge = write_lines(tmp_path / "y", {"kind": "valid", "step": 1, "loss": 1e4, "tokens": math.nan})
    (valid,) = read_run("y", huge).held_out
    assert (valid.perplexity, valid.at.tokens) == (math.inf, None)


def test_a_torn_last_line_is_left_out_and_a_torn_line_before_is_named(tmp_path: Path) -> None:
    folder = write_lines(tmp_path / "x", {"kind": "train", "step": 1, "loss": 2.0, "tokens": 7})
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(b'{"kind": "sample", "text": "\xe2\x82')  # in the middle of a character
    assert len(read_run("x", folder).trained) == 1
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("\n")
    with pytest.raises(UserError, match=r"metrics.jsonl:2: holds .* with kind and step"):
        read_run("x", folder)


def test_settings_are_one_value_a_key_and_null_is_not_set(tmp_path: Path) -> None:
    run = read_run("x", write_lines(tmp_path / "x"))
    assert run.settings == (("model.layers", "3"), ("model.cache", "true"), ("stages.0.steps", "5"))


def test_runs_of_one_name_are_distinguished_by_their_paths(tmp_path: Path) -> None:
    folders = [write_lines(tmp_path / "a" / "run"), write_lines(tmp_path / "b" / "run"), write_lines(tmp_path / "c")]
    assert [run.name for run in read_runs(folders)] == ["a/run", "b/run", "c"]


def test_figures_of_stages_add_up(tmp_path: Path) -> None:
    stages = (WrittenStage(64, 30, 1000, 5), WrittenStage(64, 20, 500, 9), WrittenStage(128, 10, 250, 7))
    written = WrittenRun(stages, log_every=1, tokens_per_batch=100, flops_per_token=3.0)
    run = read_run("x", write_run(tmp_path / "x", written))
    figures = stage_figures(run)
    assert [stage.label for stage in figures] == ["L=64", "L=64 (2)", "L=128"]
    assert [stage.steps for stage in figures] == [30, 20, 10]
    assert [stage.tokens for stage in figures] == [3000, 2000, 1000]
    assert [stage.memory_bytes for stage in figures] == [5, 9, 7]
    assert sum(stage.seconds or 0 for stage in figures) == pytest.approx(run.end.seconds)
    for stage, speed in zip(figures, (1000, 500, 250), strict=True):
        assert stage.tokens_per_second == pytest.approx(speed, rel=0.06)
        assert stage.flops_per_second == pytest.approx(3 * (stage.tokens_per_second or 0))


def test_stages_of_older_runs_have_the_time_and_speed_that_were_recorded(tmp_path: Path) -> None:
    new = stage_figures(read_run("x", write_run(tmp_path / "x")))
    old = stage_figures(read_run("y", write_run(tmp_path / "y", without=("seconds", "flops"))))
    assert [stage.seconds for stage in old] == pytest.approx([stage.seconds for stage in new])
    assert [stage.flops_per_second for stage in old] == [None, None]
    oldest = stage_figures(read_run("z", write_run(tmp_path / "z", without=("seconds", "stage_seconds"))))
    assert [stage.tokens_per_second for stage in oldest] == [21_000, 16_500]


@pytest.mark.parametrize("odd", [1e308, -1e308, 1e-320, 10**400, 690.0])  # the last one's perplexity is 1e299
def test_numbers_at_the_end_of_the_range_are_drawn(tmp_path: Path, odd: float) -> None:
    """An axis has room beyond its values, which must not overflow."""
    events = [
        {"kind": "train", "step": step, "loss": loss, "grad_norm": loss, "learning_rate": loss, "tokens": step}
        for step, loss in enumerate((2.0, odd, 3.0), start=1)
    ]
    assert "</svg>" in page([read_run("x", write_lines(tmp_path / "x", *events))])


def test_a_long_run_is_thinned_and_keeps_its_ends_and_peaks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run may have millions of lines; what is shown of it does not grow with them."""
    monkeypatch.setattr("megatron_style.reporting.history._MOST_TRAINED", 10)
    opening = {"kind": "stage", "segment_length": 8, "cache_length": 8, "tokens": 0, "seconds": 0.0, "flops": 0}
    steps = [
        {
            "kind": "train",
            "step": step,
            "loss": float(step),
            "tokens": step,
            "memory_bytes": 99 if step == 41 else step % 7,
        }
        for step in range(1, 101)
    ]
    events = [opening | {"step": 1}, *steps[:50], opening | {"step": 51}, *steps[50:]]
    run = read_run("x", write_lines(tmp_path / "x", *events))
    assert len(run.trained) <= 12
    kept = [step.at.step for step in run.trained]
    assert {50, 100} <= set(kept)
    assert kept == sorted(kept)
    assert max(step.memory_bytes or 0 for step in run.trained if step.at.step <= 50) == 99
    assert max(step.memory_bytes or 0 for step in run.trained if step.at.step > 50) == 6


def test_the_time_of_saves_is_shown_if_it_was_recorded(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "x")
    assert "stopped for saving" not in page(read_runs([folder]))
    with (folder / "metrics.jsonl").open("a") as record:
        for step, stall in ((2000, 90.0), (2000, 30.0)):
            event = SaveEvent(step=step, checkpoint=step, stall_seconds=stall, write_seconds=1800.0)
            record.write(line_of(event) + "\n")
    (run,) = read_runs([folder])
    assert [(save.stall, save.write) for save in run.saves] == [(90.0, 1800.0), (30.0, 1800.0)]
    assert "stopped for saving" in page([run])
    assert f"{TIME.text(120.0)}<small>2 checkpoints, written in {TIME.text(3600.0)}</small>" in page([run])
