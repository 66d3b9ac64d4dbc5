"""The end of a run: its last lines say what it has led to, and what helps if the model has learnt its text by heart."""

from __future__ import annotations

import math
import threading
from pathlib import Path

import pytest
from tensorboard.compat.proto.summary_pb2 import Summary

from megatron_style.base.events import ValidEvent
from megatron_style.base.run_folder import RunFolder
from megatron_style.journal.event_file import EventFile
from megatron_style.journal.farewell import farewell
from megatron_style.journal.metrics_file import MetricsFile
from tests.support.runs import tiny_run


def last_words(tmp_path: Path, *losses: float, best: int) -> str:
    run = tiny_run(output={"path": str(tmp_path)})
    metrics = MetricsFile(RunFolder(tmp_path).metrics, last_step=0)
    for step, loss in enumerate(losses, start=1):
        metrics.write(ValidEvent(step=step, loss=loss, perplexity=math.exp(loss), name="books", is_main=True))
        metrics.write(ValidEvent(step=step, loss=99.0, perplexity=2.0, name="news", is_main=False))
    RunFolder(tmp_path).checkpoint(best).mkdir(parents=True)
    return farewell(run, metrics, best).partition("\nthe model is in ")[0]


def test_a_run_that_ends_at_its_best_says_so(tmp_path: Path) -> None:
    assert last_words(tmp_path, 5.0, 4.0, best=2) == (
        "finished: held-out perplexity 54.60 after step 2, the best of this run"
    )


@pytest.mark.parametrize(("last", "learnt_by_heart"), [(4.03, False), (15.0, True)])
def test_a_held_out_loss_that_rose_is_explained(tmp_path: Path, last: float, learnt_by_heart: bool) -> None:
    first, *others = last_words(tmp_path, 4.0, last, best=1).splitlines()
    folder = RunFolder(tmp_path).checkpoint(1)
    assert first.endswith(f"; the best was perplexity 54.60 after step 1, in {folder}")
    assert ["by heart" in line and "model.dropout" in line for line in others] == [True] * learnt_by_heart


def test_a_full_disk_is_an_error_where_an_event_is_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a traceback of a thread: there is none."""
    before = set(threading.enumerate())  # other tests may have left some
    file = EventFile(tmp_path)
    summary = Summary(value=[Summary.Value(tag="loss/train", simple_value=1.0)])
    with Path("/dev/full").open("wb", buffering=0) as full:
        monkeypatch.setattr(file, "_file", full)
        with pytest.raises(OSError, match="No space left"):
            file.add_summary(summary, 1)
    assert set(threading.enumerate()) <= before
