"""Real runs on display: the bar, plain logs, figures of resumed runs, samples on every grid, DeepSpeed's monitors."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_style.config.run import RunConfig
from megatron_style.config.run_file import load_run
from tests.support.boards import expect_points
from tests.support.launch import ROOT, free_port, plain_environment
from tests.support.resuming import final_state, make_run, metrics, on_ranks
from tests.support.screen import Screen, on_a_terminal
from tests.support.small_run import write_small_run
from tests.support.training import write_corpus, write_ds_config

pytestmark = pytest.mark.slow


def test_two_ranks_under_the_launcher_train_what_one_trains_and_show_one_bar(tmp_path: Path) -> None:
    run_file = write_small_run(tmp_path, ranks=2)
    ds_config = write_ds_config(tmp_path, zero_optimization={"stage": 1})
    deepspeed = Path(sys.executable).with_name("deepspeed")
    words = [deepspeed, "--num_accelerators", 2, "--master_port", free_port(), "--module", "megatron_style.train"]
    screen = Screen()
    screen.feed(on_a_terminal([*words, run_file, "--deepspeed_config", ds_config], columns=150))
    bars = [line for line in screen.seen if "tokens/s" in line]
    steps = [line.split()[3] for line in bars]  # stage 1/2  step 3/4
    assert [step for step, before in zip(steps, ["", *steps], strict=False) if step != before] == [
        "1/4", "2/4", "3/4", "4/4",
    ]  # fmt: skip
    assert all("FLOP/s" in bar and "GiB" in bar and "left" in bar and "lr" in bar for bar in bars)
    assert not [line for line in screen.lines if "tokens/s" in line]  # no bar stays behind
    held_out = [line for line in screen.lines if "held-out perplexity" in line]
    assert [line.split(":")[0] for line in held_out[-2:]] == ["step 4/4", "finished"]
    kept = (tmp_path / "run" / "logs" / "rank_00000.log").read_text()
    lines = [line.split(",")[0] for line in kept.splitlines() if "tokens/s" in line]
    assert lines == [f"step {n}/4" for n in range(1, 5)]
    assert not set(kept) & {"\r", "\x1b"}
    one = load_run(write_small_run(tmp_path / "one", ranks=1))
    on_ranks(one, 1)
    two = load_run(run_file)
    for key in ("loss", "grad_norm"):
        found = [line[key] for line in metrics(two)]
        np.testing.assert_allclose(found, [line[key] for line in metrics(one)], rtol=1e-5)


def test_a_run_killed_in_the_middle_has_each_step_once(folder: Path) -> None:
    run = make_run(folder, steps=4000, output={"save_every": 5, "evaluate_every": 3000})
    (folder / "run.yaml").write_text(json.dumps(run.as_data()))  # JSON is YAML
    words = [sys.executable, "-m", "megatron_style.train", str(folder / "run.yaml")]
    with (folder / "told").open("wb") as told:
        process = subprocess.Popen(words, cwd=ROOT, env=plain_environment(), stderr=told)
    latest = run.output.path / "checkpoints" / "latest"
    while not latest.exists() or len(metrics(run)) < 12:
        assert process.poll() is None, (folder / "told").read_text()
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    resumed = int(latest.read_text().removeprefix("global_step"))
    assert resumed <= metrics(run)[-1]["step"]
    on_ranks(run, 1, halt_after=8)
    assert [line["step"] for line in metrics(run)] == list(range(1, resumed + 9))
    expect_points(run)
    assert len(list((run.output.path / "tensorboard").rglob("events*"))) == 2
    assert not set((folder / "told").read_text()) & {"\r", "\x1b"}
    seconds = [line["seconds"] for line in lines_of(run, "train")]
    assert seconds == sorted(seconds)


def lines_of(run: RunConfig, kind: str) -> list[dict[str, Any]]:
    lines = map(json.loads, (run.output.path / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == kind]


def test_no_second_is_lost_between_a_line_and_a_checkpoint(folder: Path) -> None:
    """Lines are rare: those at checkpoints, of whatever cause, carry the time on."""
    run = make_run(folder, steps=12, output={"log_every": 100, "save_every": 4})
    on_ranks(run, 1, halt_after=5)
    on_ranks(run, 1)
    lines = lines_of(run, "train")
    assert [line["step"] for line in lines] == [4, 5, 6, 8, 10, 12]  # 10 is the best so far
    for before, line in pairwise(lines):
        took = (line["tokens"] - before["tokens"]) / line["tokens_per_second"]
        assert line["seconds"] == pytest.approx(before["seconds"] + took)
    ends = [line["stage_seconds"] for line in lines_of(run, "stage_end")]
    assert sum(ends) == pytest.approx(lines[-1]["seconds"])


SAMPLED = {"evaluate_every": 3, "sample_tokens": 12, "save_every": 6}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    folder = tmp_path_factory.mktemp("alone")
    write_corpus(folder)
    run = make_run(folder, steps=6, output=SAMPLED)
    on_ranks(run, 1)
    return run


@pytest.mark.parametrize(
    "grid",
    [
        {"tensor": 2},
        {"zero": 3, "data": 2},
        pytest.param({"zero": 3, "tensor": 2, "data": 2}, marks=pytest.mark.sweep),
    ],
    ids=str,
)
def test_samples_are_those_of_one_process(folder: Path, alone: RunConfig, grid: dict[str, int]) -> None:
    run = make_run(folder, steps=6, output=SAMPLED, **grid)
    on_ranks(run, size_of(grid))
    samples = metrics(run, "sample")
    assert [sample["step"] for sample in samples] == [3, 6]
    assert all(len(sample["text"].split()) == 12 for sample in samples)
    assert samples == metrics(alone, "sample")


def size_of(grid: dict[str, int]) -> int:
    return grid.get("tensor", 1) * grid.get("data", 1)


@pytest.mark.parametrize(
    "grid",
    [
        {"zero": 0},
        {"zero": 3, "tensor": 2},
        pytest.param({"zero": 1, "data": 2}, marks=pytest.mark.sweep),
        pytest.param({"zero": 2, "data": 2, "tensor": 2}, marks=pytest.mark.sweep),
        pytest.param({"zero": 3, "data": 2}, marks=pytest.mark.sweep),
    ],
    ids=str,
)
def test_validating_and_sampling_after_every_step_changes_nothing(folder: Path, grid: dict[str, int]) -> None:
    settings: dict[str, Any] = {"steps": 2, "dropout": True, **grid}
    never = make_run(folder, "never", output={"evaluate_every": 100, "sample_tokens": 0}, **settings)
    always = make_run(folder, "always", output={"evaluate_every": 1, "sample_tokens": 5}, **settings)
    for run in (never, always):
        on_ranks(run, size_of(grid))
    assert metrics(never, "sample") == []
    assert len(metrics(always, "sample")) == 2
    assert metrics(never) == metrics(always)
    mine, theirs = final_state(always), final_state(never)
    assert all(torch.equal(mine[name][key], x) for name, state in theirs.items() for key, x in state.items())


def test_monitors_of_the_ds_config_are_written(folder: Path) -> None:
    """Nothing of the rehearsed steps, and one row for each line."""
    run = make_run(folder, steps=6, data=2)
    place = {"enabled": True, "output_path": str(folder / "theirs")}
    write_ds_config(
        folder,
        zero_optimization={"stage": 1},
        csv_monitor=place | {"job_name": "csv"},
        tensorboard=place | {"job_name": "tb"},
    )
    on_ranks(run, 2)
    rows = (folder / "theirs" / "csv" / "Train_Samples_lr.csv").read_text().splitlines()
    assert [row.split(",")[0] for row in rows] == ["step", "2", "4", "6", "8", "10", "12"]
    losses = (folder / "theirs" / "csv" / "loss_train.csv").read_text().splitlines()[1:]
    assert [float(row.split(",")[1]) for row in losses] == [line["loss"] for line in metrics(run)]
    board = EventAccumulator(str(folder / "theirs" / "tb")).Reload()
    assert [np.float32(p.value) for p in board.Scalars("loss/train")] == [np.float32(e["loss"]) for e in metrics(run)]
    assert len(board.Scalars("Train/Samples/lr")) == 6
