"""A run that diverges fails with its own exit code, and keeps a valid checkpoint."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megatron_style.base.command import EXIT_DIVERGED, run_command
from megatron_style.base.errors import Diverged
from megatron_style.config.run import RunConfig
from megatron_style.engine.engine import TrainingEngine
from megatron_style.inference.held_out import HeldOut, held_out
from megatron_style.parallel.local_ranks import run_ranks
from megatron_style.train import train
from tests.support.resuming import make_run, metrics, on_ranks

pytestmark = pytest.mark.slow


def train_and_spoil(run: RunConfig, after: int, what: str) -> None:
    """Train; after some backward passes (the preflight has two) the held-out loss or the gradients are not finite."""
    accumulate = TrainingEngine.accumulate
    seen = 0

    def spoiled(engine: TrainingEngine, loss: torch.Tensor, *, is_last: bool, **others: Any) -> None:
        nonlocal seen
        seen += is_last
        spoils = what == "gradients" and seen > after
        accumulate(engine, loss * torch.inf if spoils else loss, is_last=is_last, **others)

    def spoiled_held_out(*args: Any) -> HeldOut:
        found = held_out(*args)
        return replace(found, loss=math.nan) if what == "held-out" and seen > after else found

    with (
        patch.object(TrainingEngine, "accumulate", spoiled),
        patch("megatron_style.train.held_out", spoiled_held_out),
        pytest.raises(SystemExit) as left,
    ):
        run_command(lambda: train(run))
    assert left.value.code == EXIT_DIVERGED


@pytest.mark.parametrize(("zero", "half"), [(0, False), (1, True)])
@pytest.mark.parametrize("what", ["held-out", "gradients"])
def test_it_does_not_finish(folder: Path, zero: int, half: bool, what: str) -> None:
    output = {"save_every": 1, "evaluate_every": 6, "keep_last": 1}
    run = make_run(folder, steps=12, zero=zero, half=half, output=output)
    run_ranks(1, train_and_spoil, run, 9, what)
    status = json.loads((run.output.path / "status.json").read_text())
    assert status["state"] == "diverged"
    assert not (run.output.path / "model").exists()
    told = "the held-out loss is nan" if what == "held-out" else "the gradients of the last steps are not finite"
    assert told in status["error"]
    kept = sorted(int(path.name[11:]) for path in (run.output.path / "checkpoints").glob("global_step*"))
    assert kept == [6, 11]  # the newest, and the newest that is known to be sound


@pytest.mark.slow
def test_resuming_from_the_sound_one_finishes(folder: Path) -> None:
    """The broken one is removed by hand, as the message says."""
    whole = make_run(folder, "whole", steps=12, output={"evaluate_every": 6})
    on_ranks(whole, 1)
    run = make_run(folder, steps=12, output={"save_every": 1, "evaluate_every": 6, "keep_last": 1})
    run_ranks(1, train_and_spoil, run, 9, "held-out")
    (run.output.path / "checkpoints" / "global_step11").rename(folder / "away")
    on_ranks(run, 1)
    assert [event["loss"] for event in metrics(run)] == [event["loss"] for event in metrics(whole)]


def skip_everything(run: RunConfig) -> None:
    accumulate = TrainingEngine.accumulate

    def spoiled(engine: TrainingEngine, loss: torch.Tensor, *, is_last: bool, **others: Any) -> None:
        accumulate(engine, loss * torch.inf, is_last=is_last)

    with patch.object(TrainingEngine, "accumulate", spoiled), pytest.raises(Diverged, match=r"of 5 steps in a row"):
        train(run)


def test_too_many_skipped_updates_in_a_row(folder: Path) -> None:
    optimizer: dict[str, Any] = {"max_skipped": 5}
    run_ranks(1, skip_everything, make_run(folder, steps=12, optimizer=optimizer))


@pytest.mark.slow
def test_changed_settings_are_applied_and_said(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """On the same grid as on another; the older run file is kept."""
    losses = []
    for grid in (1, 2):
        name = f"grid{grid}"
        on_ranks(make_run(folder, name, steps=12), 1, halt_after=4)
        capfd.readouterr()
        changes = {"momentum": 0.5, "weight_decay": 0.01, "learning_rate": {"peak": 0.2, "warmup_steps": 3}}
        run = make_run(folder, name, steps=12, data=grid, optimizer=changes)
        on_ranks(run, grid)
        told = next(line for line in capfd.readouterr().err.splitlines() if line.startswith("changed since step 4: "))
        assert "optimizer.momentum: 0.99 -> 0.5" in told
        assert "optimizer.weight_decay: 0.0 -> 0.01" in told
        assert "optimizer.learning_rate.peak: 0.3 -> 0.2" in told
        assert "momentum: 0.99" in (run.output.path / "run.until_step4.yaml").read_text()
        losses.append([event["loss"] for event in metrics(run)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
