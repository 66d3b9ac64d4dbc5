"""The model at the end of a run: the next start removes what a killed export leaves."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from torch.multiprocessing import ProcessExitedException

from megatron_style.base.files import remove_leftovers
from megatron_style.config.run import RunConfig
from megatron_style.formats.model_folder import export
from megatron_style.parallel.local_ranks import run_ranks
from megatron_style.train import train
from tests.support.resuming import age_event_files, make_run, on_ranks
from tests.support.tiny import content
from tests.support.training import write_corpus

_OPERATIONS = ("open", "os.mkdir", "os.rename", "os.rmdir", "os.chmod", "shutil.rmtree", "tempfile.mkdtemp")


def export_and_die(run: RunConfig, at: int) -> int:
    """Train; with the operation of this number on the disk, the export ends by SIGKILL. Return how many there are."""
    seen = 0

    def count(event: str, args: Any) -> None:
        nonlocal seen
        if event in _OPERATIONS and any("model" in str(arg) for arg in args):  # not those of the heartbeat's thread
            seen += 1
            if seen == at:
                os.kill(os.getpid(), signal.SIGKILL)

    def watched_export(*args: Any, is_first: bool) -> None:
        sys.addaudithook(count)
        export(*args, is_first=is_first)

    with patch("megatron_style.train.export", watched_export):
        train(run)
    return seen


@pytest.mark.slow
def test_a_kill_in_the_export_leaves_nothing_for_good(tmp_path: Path) -> None:
    """Also while an older model is replaced, which every start after the first does."""
    write_corpus(tmp_path)
    run = make_run(tmp_path, steps=4)
    on_ranks(run, 1)
    expected = content(run.output.path / "model")
    (operations,) = run_ranks(1, export_and_die, run, 0)
    assert operations > 15
    mine = run.output.path / ".model.mine"
    mine.mkdir()
    left = set()
    for at in range(1, operations + 1, 2):
        with suppress(ProcessExitedException):  # after a kill in the replacement there are fewer operations
            age_event_files(run)
            run_ranks(1, export_and_die, run, at)
        hidden = {path.name for path in run.output.path.glob(".*")} - {mine.name}
        assert len(hidden) <= 2  # of this kill alone: the new model and the old one
        left |= hidden
    assert len(left) > 5  # most of the kills left something
    on_ranks(run, 1)
    assert [path.name for path in run.output.path.glob(".*")] == [mine.name]
    assert content(run.output.path / "model") == expected


@pytest.mark.parametrize("name", ["model", "mo[d]el"])
def test_only_leftovers_of_that_name_are_removed(tmp_path: Path, name: str) -> None:
    kept = [".model2.partial.x", ".model.x", "model.partial.x", ".other.partial.x"]
    for folder in (*kept, f".{name}.partial.x"):
        (tmp_path / folder).mkdir()
    remove_leftovers(tmp_path / name)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(kept)
