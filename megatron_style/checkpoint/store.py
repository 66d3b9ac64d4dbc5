"""Everything a run needs to go on as if it had never stopped.

`checkpoints/global_stepN/` is DeepSpeed's layout plus `caches_*.safetensors`, one for each data-parallel rank;
`checkpoints/latest` names the newest one. A checkpoint is written aside and renamed when all ranks are done, and
`latest` is moved last, so that a kill at any moment leaves the one before.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from megatron_style.model.cache import SegmentCache
from megatron_style.parallel.topology import Topology
from megatron_style.runtime.engine import TrainingEngine
from megatron_style.schedule.stages import Stage, StageSchedule

_PREFIX = "global_step"


@dataclass(frozen=True)
class Progress:
    """What a resumed run needs beside weights and optimizer state: the next step, and one cache per micro-batch."""

    step: int = 0
    caches: tuple[SegmentCache, ...] = ()


class CheckpointStore:
    def __init__(self, folder: Path, topology: Topology) -> None:
        self._folder, self._topology = folder, topology
        self._cache_file = f"caches_data_rank_{topology.data.rank:05d}.safetensors"

    def restore(self, engine: TrainingEngine, schedule: StageSchedule) -> Progress:
        """The latest checkpoint, or a fresh start when there is none."""
        latest = self._folder / "latest"
        if not latest.exists():
            return Progress()
        tag = latest.read_text(encoding="utf-8").strip()
        step = int(tag.removeprefix(_PREFIX))
        engine.load(self._folder, tag)
        stage = schedule.plan(max(0, step - 1)).stage
        return Progress(step, self._read_caches(self._folder / tag, stage, engine.device))

    def save(self, engine: TrainingEngine, progress: Progress) -> None:
        name = f"{_PREFIX}{progress.step}"
        aside = self._folder / f"{name}.partial"
        if self._topology.is_first:
            shutil.rmtree(aside, ignore_errors=True)
            self._folder.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        engine.save(self._folder, aside.name)
        if self._topology.tensor.rank == 0:
            self._write_caches(aside, progress.caches)
        dist.barrier()
        if self._topology.is_first:
            shutil.rmtree(self._folder / name, ignore_errors=True)
            aside.rename(self._folder / name)
            self._point_to(name)
        dist.barrier()

    def _point_to(self, name: str) -> None:
        new = self._folder / "latest.new"
        new.write_text(name, encoding="utf-8")
        new.replace(self._folder / "latest")

    def _write_caches(self, folder: Path, caches: Sequence[SegmentCache]) -> None:
        """All rows of this data-parallel rank, in the order of their lanes: they do not depend on the micro-batches."""
        layers = zip(*(cache.layers for cache in caches), strict=True)
        save_file({f"{i}": torch.cat(rows).contiguous() for i, rows in enumerate(layers)}, folder / self._cache_file)

    def _read_caches(self, folder: Path, stage: Stage, device: torch.device) -> tuple[SegmentCache, ...]:
        tensors = load_file(folder / self._cache_file, device=str(device))
        layers = [tensors[f"{i}"].split(stage.micro_rows) for i in range(len(tensors))]
        return tuple(SegmentCache(rows, stage.cache_length) for rows in zip(*layers, strict=True))
