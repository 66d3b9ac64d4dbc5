"""Profile a few steps: a trace of torch's profiler and, where the accelerator records one, a snapshot of its memory."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from megatron_style.base.command import log
from megatron_style.base.errors import UserError
from megatron_style.base.run_folder import RunFolder
from megatron_style.config.run import RunConfig

_BEFORE = 2  # steps of a launch that are not profiled: the first ones allocate, and the profiler itself warms up
_MOST_ENTRIES = 100_000  # allocations that a snapshot keeps
_OPERATORS = 30  # in the summary


class StepProfiler(Protocol):
    def step(self) -> None:
        """Note that a step has ended."""


class NoProfile:
    """Profiles nothing."""

    def step(self) -> None:
        pass


class StepProfile:
    """Profiles `steps` steps of this launch after its first two, into files of a folder."""

    def __init__(self, folder: Path, steps: int, device: torch.device) -> None:
        self._folder = folder
        self._steps = steps
        self._done = 0
        self._has_snapshot = device.type == "cuda"
        activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if self._has_snapshot else [])
        self._profile = profile(
            activities=activities,
            schedule=schedule(wait=_BEFORE - 1, warmup=1, active=steps, repeat=1),
            record_shapes=True,
            profile_memory=True,
            on_trace_ready=self._write,
        )
        self._profile.start()

    def step(self) -> None:
        self._done += 1
        if self._done == _BEFORE and self._has_snapshot:
            torch.cuda.memory._record_memory_history(max_entries=_MOST_ENTRIES)
        if self._done <= _BEFORE + self._steps:
            self._profile.step()
        if self._done == _BEFORE + self._steps:
            self._profile.stop()

    def _write(self, found: profile) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        found.export_chrome_trace(str(self._folder / "trace.json.gz"))
        by = "self_cuda_time_total" if self._has_snapshot else "self_cpu_time_total"
        summary = found.key_averages().table(sort_by=by, row_limit=_OPERATORS)
        (self._folder / "operators.txt").write_text(summary + "\n", encoding="utf-8")
        snapshot = "no memory snapshot, which only CUDA and ROCm have"
        if self._has_snapshot:
            torch.cuda.memory._dump_snapshot(str(self._folder / "memory.pickle"))
            torch.cuda.memory._record_memory_history(enabled=None)
            snapshot = "and memory.pickle"
        log(f"profile: {self._steps} steps in {self._folder}: trace.json.gz, operators.txt, {snapshot}")


def open_profile(run: RunConfig, device: torch.device, steps: int | None, *, of: int, writes: bool) -> StepProfiler:
    """Return the profiler of this rank, for some of the steps that are left; only the first rank has one. All ranks
    refuse what the run is too short for."""
    if steps is None:
        return NoProfile()
    if steps > of - _BEFORE:
        raise UserError(
            f"--profile {steps}: {of} steps are left, and the first {_BEFORE} of a launch are not profiled; "
            f"use at most {max(0, of - _BEFORE)}, or leave it out"
        )
    return StepProfile(RunFolder(run.output.path).profile, steps, device) if writes else NoProfile()
