"""Auxiliary losses of a model are recorded by name, as means over micro-batches and ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_style.base.events import TrainEvent, read_events
from megatron_style.base.run_folder import RunFolder
from megatron_style.engine.engine import TrainingEngine
from megatron_style.model.shortformer import Output
from megatron_style.parallel.local_ranks import run_ranks
from megatron_style.train import train
from tests.support.models import model_config
from tests.support.runs import tiny_run
from tests.support.training import VOCAB_SIZE, write_corpus, write_ds_config

forward = TrainingEngine.forward


def with_auxiliary(engine: TrainingEngine, inputs: Any, *others: Any) -> Output:
    """Add two losses: the mean id of the input, of which no gradient comes, and the mean loss, doubled."""
    output = forward(engine, inputs, *others)
    ids = inputs.float().mean().to(engine.device)
    return output._replace(auxiliary={"ids": ids, "double": 2 * output.nll.mean()})


def recorded(folder: Path, *, ranks: int, micro_rows: int, **settings: Any) -> list[TrainEvent]:
    run = tiny_run(
        **settings,
        stages=[{"segment_length": 8, "steps": 3, "micro_rows": micro_rows}],
        tokens_per_batch=192 // ranks,
        data={"train": str(folder / "train"), "valid": str(folder / "valid"), "vocab_size": VOCAB_SIZE},
        output={"path": str(folder / f"ranks{ranks}"), "log_every": 1, "evaluate_tokens": 100},
    )
    run_ranks(ranks, train, run)
    return [event for event in read_events(RunFolder(run.output.path).metrics) if isinstance(event, TrainEvent)]


@pytest.mark.slow
def test_auxiliary_losses_are_means_over_micro_batches_and_ranks(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    with patch.object(TrainingEngine, "forward", with_auxiliary):
        one, two = recorded(tmp_path, ranks=1, micro_rows=24), recorded(tmp_path, ranks=2, micro_rows=6)
    assert len(one) == len(two) == 3
    for alone, split in zip(one, two, strict=True):
        assert alone.auxiliary is not None
        assert split.auxiliary == pytest.approx(alone.auxiliary, rel=1e-5)
        assert alone.auxiliary["ids"] > 1
        assert alone.auxiliary["double"] == pytest.approx(2 * (alone.loss or 0), rel=1e-5)
    board = EventAccumulator(str(RunFolder(tmp_path / "ranks2").tensorboard / "ranks2")).Reload()
    points = [point.value for point in board.Scalars("loss_auxiliary/ids")]
    assert points == pytest.approx([event.auxiliary["ids"] for event in two if event.auxiliary])


@pytest.mark.slow
def test_the_loss_of_a_compression_is_recorded_apart_from_the_loss_of_the_text(tmp_path: Path) -> None:
    """The first segment has zeros in its memory, which are compressed without loss."""
    write_corpus(tmp_path)
    model = model_config("compressive").model.as_data()
    sharded = str(write_ds_config(tmp_path, zero_optimization={"stage": 3}))
    one = recorded(tmp_path, ranks=1, micro_rows=24, model=model)
    two = recorded(tmp_path, ranks=2, micro_rows=6, model=model, deepspeed=sharded)
    for event in (one, two):
        losses = [train.auxiliary["compression"] for train in event if train.auxiliary]
        assert losses[0] == 0 < min(losses[1:])
    assert [event.loss for event in two] == pytest.approx([event.loss for event in one], rel=1e-5)
    assert [event.auxiliary for event in two] == [pytest.approx(event.auxiliary, rel=1e-4) for event in one]


def test_a_model_without_any_records_none(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    events = recorded(tmp_path, ranks=1, micro_rows=24)
    assert [event.auxiliary for event in events] == [None] * 3
    assert "auxiliary" not in RunFolder(tmp_path / "ranks1").metrics.read_text()
