"""Calibration: the share of a GPU's peak that a recorded run has reached."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from megatron_style.base.errors import UserError
from megatron_style.base.events import Event, StageEvent, TrainEvent, read_events
from megatron_style.base.run_folder import RunFolder
from megatron_style.config.ds_file import read_ds_file
from megatron_style.config.run import RunConfig
from megatron_style.config.run_file import load_run
from megatron_style.planning.hardware import Gpu
from megatron_style.planning.setup import Setup, setup_of, sharding_of
from megatron_style.planning.text import text_facts
from megatron_style.planning.timing import Machine, estimate_time
from megatron_style.schedule.stages import resolve_stage


def measured_efficiency(folder: Path, gpu: Gpu) -> float:
    """Return the median efficiency over the steps that this folder's run recorded, assuming it ran on such GPUs."""
    files = RunFolder(folder)
    for needed in (files.run_file, files.metrics):
        if not needed.is_file():
            raise UserError(f"--calibrate {folder}: no {needed.name} in it; the folder of a run is expected")
    run = load_run(files.run_file)
    measured = _measured(read_events(files.metrics), stages=len(run.stages))
    if not measured:
        raise UserError(f"--calibrate {folder}: its run has not recorded any training yet; choose one that has")
    efficiency = median(_efficiencies(run, measured, _setup(run, measured, folder), gpu))
    if not 0 < efficiency <= 1:
        raise UserError(
            f"--calibrate {folder}: its steps reach {efficiency:.2g} of the peak of {gpu.name}; "
            f"set --gpu to the GPU that it ran on"
        )
    return efficiency


class _Measured(NamedTuple):
    stage: int
    tokens_per_step: float  # over all steps so far
    tokens_per_second: float


def _measured(events: Iterable[Event], *, stages: int) -> list[_Measured]:
    """Return what was recorded of speed. Older runs recorded the stage of a step only when it opened."""
    found = []
    index = 0
    for event in events:
        if isinstance(event, StageEvent) and event.index is not None:
            index = event.index
        if isinstance(event, TrainEvent) and event.step > 0 and event.tokens and event.tokens_per_second:
            stage = index if event.stage is None else event.stage
            if 0 <= stage < stages:
                found.append(_Measured(stage, event.tokens / event.step, event.tokens_per_second))
    return found


def _setup(run: RunConfig, measured: Sequence[_Measured], folder: Path) -> Setup:
    """Return the run's setup. The number of ranks is not recorded, so it is derived from the tokens per step."""
    try:
        text = text_facts(run)
    except UserError as error:
        raise UserError(f"--calibrate {folder}: {error}") from None
    ranks = max(1, round(measured[-1].tokens_per_step / run.data.tokens_per_batch))
    return setup_of(run, text, sharding_of(run, read_ds_file(run.deepspeed)), gpus=ranks * run.parallel.tensor)


def _efficiencies(run: RunConfig, measured: Sequence[_Measured], setup: Setup, gpu: Gpu) -> Iterator[float]:
    times = [estimate_time(setup, resolve_stage(run, index), Machine(gpu, 1.0)) for index in range(len(run.stages))]
    for each in measured:
        time = times[each.stage]
        seconds = run.data.tokens_per_batch * setup.data / each.tokens_per_second
        other = time.update + time.tensor + (0 if setup.sharding.reduces_in_backward else time.data)
        yield time.compute / (seconds - other if seconds > other else seconds)
