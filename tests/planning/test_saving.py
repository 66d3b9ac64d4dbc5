"""The planned size of a checkpoint is the size of the files, and a crash costs what was done since the last one."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_style.config.ds_file import read_ds_file
from megatron_style.config.run import OutputConfig
from megatron_style.parallel.local_ranks import run_ranks
from megatron_style.planning.saving import SavingEstimate
from megatron_style.planning.setup import setup_of, sharding_of
from megatron_style.planning.text import text_facts
from megatron_style.schedule.stages import stages_of
from tests.support.resuming import make_run, train_until

OVERHEAD = 30_000  # names, shapes and settings


@pytest.mark.slow
@pytest.mark.parametrize(("zero", "half"), [(1, False), (2, True)])
def test_the_files_have_the_planned_size(folder: Path, zero: int, half: bool) -> None:
    model = {"hidden_size": 64, "ffn_size": 256}
    run = make_run(folder, data=2, zero=zero, half=half, steps=2, model=model, optimizer={"name": "adamw"})
    run_ranks(2, train_until, run, None)
    setup = setup_of(run, text_facts(run), sharding_of(run, read_ds_file(run.deepspeed)), gpus=2)
    planned = SavingEstimate.of(setup, run.output, stages_of(run)[-1:], 1.0).checkpoint_bytes
    files = [path for path in (run.output.path / "checkpoints" / "global_step2").iterdir() if path.suffix != ".json"]
    written = sum(path.stat().st_size for path in files)
    assert 0 <= written - planned < OVERHEAD


@pytest.mark.parametrize(("save_every", "lost"), [(100, 202.0), ("30m", 1802.0), (None, None)])
def test_a_crash_costs_the_work_since_the_last_checkpoint(
    folder: Path, save_every: int | str | None, lost: float | None
) -> None:
    run = make_run(folder)
    setup = setup_of(run, text_facts(run), sharding_of(run, read_ds_file(run.deepspeed)), gpus=1)
    output = OutputConfig(path=Path("run"), save_every=save_every)
    assert SavingEstimate.of(setup, output, stages_of(run), 2.0).lost_seconds == lost
