"""Calibration: the share of a GPU's peak that a recorded run has reached."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

from megatron_style.base.errors import UserError
from megatron_style.base.events import Event, read_events
from megatron_style.config.ds_file import read_ds_file
from megatron_style.config.run import RunConfig, load_run
from megatron_style.planning.hardware import Gpu
from megatron_style.planning.setup import Setup, setup_of, sharding_of
from megatron_style.planning.text import text_facts
from megatron_style.planning.timing import Machine, estimate_time
from megatron_style.schedule.stages import resolve_stage


def measured_efficiency(folder: Path, gpu: Gpu) -> float:
    """Return the median efficiency over the steps that this folder's run recorded, assuming it ran on such GPUs."""
    for name in ("run.yaml", "metrics.jsonl"):
        if not (folder / name).is_file():
            raise UserError(f"--calibrate {folder}: no {name} in it; the folder of a run is expected")
    run = load_run(folder / "run.yaml")
    recorded = read_events(folder / "metrics.jsonl")
    events = [event for event in recorded if event["kind"] != "train" or event.get("tokens_per_second")]
    trained = [event for event in events if event["kind"] == "train"]
    if not trained:
        raise UserError(f"--calibrate {folder}: its run has not recorded any training yet; choose one that has")
    efficiency = median(_efficiencies(run, events, _setup(run, trained, folder), gpu))
    if not 0 < efficiency <= 1:
        raise UserError(
            f"--calibrate {folder}: its steps reach {efficiency:.2g} of the peak of {gpu.name}; "
            f"set --gpu to the GPU that it ran on"
        )
    return efficiency


def _setup(run: RunConfig, trained: Sequence[Event], folder: Path) -> Setup:
    """Return the run's setup. The number of ranks is not recorded, so it is derived from the tokens per step."""
    try:
        text = text_facts(run)
    except UserError as error:
        raise UserError(f"--calibrate {folder}: {error}") from None
    ranks = max(1, round(trained[-1]["tokens"] / trained[-1]["step"] / run.data.tokens_per_batch))
    return setup_of(run, text, sharding_of(run, read_ds_file(run.deepspeed)), gpus=ranks * run.parallel.tensor)


def _efficiencies(run: RunConfig, events: Sequence[Event], setup: Setup, gpu: Gpu) -> Iterator[float]:
    times = [estimate_time(setup, resolve_stage(run, index), Machine(gpu, 1.0)) for index in range(len(run.stages))]
    index = 0
    for event in events:
        if event["kind"] == "stage":
            index = event.get("index", index)
        if event["kind"] == "train":
            time = times[event.get("stage", index)]
            seconds = run.data.tokens_per_batch * setup.data / event["tokens_per_second"]
            other = time.update + time.tensor + (0 if setup.sharding.reduces_in_backward else time.data)
            yield time.compute / (seconds - other if seconds > other else seconds)
