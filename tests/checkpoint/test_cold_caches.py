"""A run that saves no caches resumes with empty ones, and still trains every token exactly once."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from megatron_style.config.run import RunConfig
from megatron_style.data.batch import read_batch
from megatron_style.parallel.local_ranks import run_ranks
from tests.support.resuming import age_event_files, expect_bitwise, make_run, metrics, train_until

pytestmark = pytest.mark.slow
COLD = {"save_caches": False}


def train_and_note(run: RunConfig, notes: Path, halt_after: int | None) -> None:
    """Train, and note the targets of every micro-batch."""
    with (notes / os.environ["RANK"]).open("a") as file:

        def noted(*args: Any, **more: Any) -> Any:
            batch = read_batch(*args, **more)
            file.write(json.dumps(batch.targets[batch.counted.astype(bool)].tolist()) + "\n")
            return batch

        with patch("megatron_style.engine.gradients.read_batch", noted):
            train_until(run, halt_after)


def trained_text(run: RunConfig, notes: Path, *launches: int | None) -> list[str]:
    """Train in several launches, each stopped after some steps, and return what each rank has read."""
    notes.mkdir()
    for halt_after in launches:
        age_event_files(run)
        run_ranks(2, train_and_note, run, notes, halt_after)
    return [(notes / str(rank)).read_text() for rank in range(2)]


@pytest.mark.parametrize("zero", [1, pytest.param(3, marks=pytest.mark.sweep)])
def test_without_caches_a_resumed_run_reads_the_same_text_once(
    folder: Path, zero: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """10 steps of which the first epoch has 7, in which both launches end and begin."""
    undisturbed = make_run(folder, "undisturbed", data=2, zero=zero, steps=10, output=COLD)
    expected = trained_text(undisturbed, folder / "expected", None)
    run = make_run(folder, "run", data=2, zero=zero, steps=10, output=COLD)
    capfd.readouterr()
    assert trained_text(run, folder / "found", 3, None) == expected
    checkpoint = run.output.path / "checkpoints" / "global_step3"
    assert f"{checkpoint}: was saved without caches (output.save_caches is false)" in capfd.readouterr().err
    assert not list(run.output.path.rglob("caches_*"))
    losses = [event["loss"] for event in metrics(run)]
    warm = [event["loss"] for event in metrics(undisturbed)]
    assert losses[:3] == warm[:3]
    assert losses[3] != warm[3]  # the first segment of each lane had no text before it


@pytest.mark.parametrize(
    ("model", "halt_after"), [({}, 5), ({"cache": False, "positions": "added"}, 3)], ids=["new-lanes", "no-cache"]
)
def test_where_there_is_nothing_to_remember_nothing_changes(
    folder: Path, model: dict[str, Any], halt_after: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """At the switch of stages all lanes are new; a model without a cache has none."""
    undisturbed = make_run(folder, "undisturbed", steps=10, model=model)
    run = make_run(folder, "run", steps=10, model=model, output=COLD)
    run_ranks(1, train_until, undisturbed, None)
    run_ranks(1, train_until, run, halt_after)
    age_event_files(run)
    run_ranks(1, train_until, run, None)
    assert "was saved without caches" not in capfd.readouterr().err
    expect_bitwise(run, undisturbed)


def test_a_run_may_begin_and_cease_to_save_its_caches(folder: Path) -> None:
    """What counts is how the checkpoint was written, not what the run file says now."""
    undisturbed = make_run(folder, "undisturbed", steps=10)
    run_ranks(1, train_until, undisturbed, None)
    warm = make_run(folder, "run", steps=10)
    cold = make_run(folder, "run", steps=10, output=COLD)
    run_ranks(1, train_until, warm, 3)
    age_event_files(cold)
    run_ranks(1, train_until, cold, None)
    expect_bitwise(cold, undisturbed)
