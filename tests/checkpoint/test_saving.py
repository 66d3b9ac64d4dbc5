"""When to save changes nothing of what is computed: by time, by quality, and after going back."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_style.base.run_folder import RunFolder
from megatron_style.checkpoint.manifest import Best
from megatron_style.checkpoint.origin import Progress
from megatron_style.config.run import RunConfig
from megatron_style.parallel.local_ranks import run_ranks
from megatron_style.train import train
from tests.support.resuming import age_event_files, expect_bitwise, make_run, metrics, on_ranks


def go_back(run: RunConfig, step: int) -> None:
    train(run, resume_from=step)


def steps_of(run: RunConfig) -> list[int]:
    return RunFolder(run.output.path).steps()


@pytest.mark.slow
@pytest.mark.parametrize("half", [True, pytest.param(False, marks=pytest.mark.sweep)])
def test_saving_by_time_and_going_back_are_exact(folder: Path, half: bool, capfd: pytest.CaptureFixture[str]) -> None:
    settings = {"steps": 8, "data": 2, "half": half, "dropout": True}
    rarely = {"save_every": None, "keep_best": False, "evaluate_every": 3}
    by_stage = make_run(folder, "by_stage", **settings, output=rarely)
    by_time = make_run(folder, "by_time", **settings, output=rarely | {"save_every": "0.001s", "keep_last": 20})
    on_ranks(by_stage, 2)
    on_ranks(by_time, 2)
    assert steps_of(by_stage) == [4, 8]
    assert set(steps_of(by_time)) > {4, 8}
    expect_bitwise(by_time, by_stage)

    age_event_files(by_time)
    step = steps_of(by_time)[0]
    run_ranks(2, go_back, by_time, step)
    expect_bitwise(by_time, by_stage)
    aside = {path.name for path in RunFolder(by_time.output.path).checkpoints.glob("*.abandoned")}
    assert "global_step8.abandoned" in aside
    assert "set aside, to be removed when they are not needed" in capfd.readouterr().err


@pytest.mark.slow
def test_a_step_that_was_not_saved_is_refused_with_those_that_were(folder: Path) -> None:
    run = make_run(folder, steps=4, output={"save_every": 2, "evaluate_every": None})
    on_ranks(run, 1)
    with pytest.raises(Exception, match=r"--resume-from 3: .* has no checkpoint of this step; there are 2, 4"):
        run_ranks(1, go_back, run, 3)
    assert steps_of(run) == [2, 4], "a refused start changes nothing"


@pytest.mark.slow
def test_the_best_checkpoint_is_saved_and_kept(folder: Path) -> None:
    """With a learning rate at which the held-out loss goes up and down."""
    rate = {"learning_rate": {"peak": 20.0}, "clip_norm": 5.0}
    output = {"save_every": None, "keep_last": 1, "evaluate_every": 1}
    run = make_run(folder, steps=8, optimizer=rate, output=output)
    on_ranks(run, 1)
    losses = {event["step"]: event["loss"] for event in metrics(run, "valid")}
    best = min(losses, key=losses.__getitem__)
    assert best != 8, "the test needs a run whose end is not its best"
    assert steps_of(run) == [best, 8]


def test_a_loss_of_another_text_is_not_compared() -> None:
    progress = Progress(step=3).evaluated(2.0, "a text")
    assert progress.is_best
    later = Progress(step=6, best=progress.best)
    assert later.evaluated(2.5, "a text").best == Best(3, 2.0, "a text")
    assert later.evaluated(2.5, "another").best == Best(6, 2.5, "another")
    assert later.evaluated(2.5, "another").sound == 6
