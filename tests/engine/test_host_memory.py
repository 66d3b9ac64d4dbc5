"""No rank holds more of a model than its shard and a little: neither when it is built nor when it is exported."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_style.config.model import ModelFolderConfig
from megatron_style.config.run import RunConfig
from megatron_style.engine.build import build_engine
from megatron_style.engine.engine import TrainingEngine
from megatron_style.engine.local_ranks import run_ranks
from megatron_style.engine.session import distributed_session
from megatron_style.formats import model_folder
from megatron_style.formats.source import ModelSource, tensors_of
from megatron_style.parallel.peak_memory import peak_memory
from megatron_style.schedule.stages import StageSchedule
from tests.support.resuming import make_run

MODEL = {"layers": 12, "hidden_size": 512, "heads": 8, "ffn_size": 2048, "vocabulary": {"kind": "tied"}}  # 155 MB
VOCAB_SIZE = 2048
EXTRA = 12 * 2**20  # of allocator, collectives and buffers
CPU = torch.device("cpu")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux tells what a process holds"),
]


def build(run: RunConfig, topology: Any) -> TrainingEngine:
    schedule = StageSchedule(run, corpus_tokens=1200, data_parallel=topology.data.size)
    return build_engine(run, schedule, VOCAB_SIZE, topology)


def resident() -> int:
    """Return what this process holds now."""
    with peak_memory(CPU) as peak:
        return peak()


def measured(action: Callable[[], object]) -> int:
    """Return by how many bytes the action exceeds what was held before it."""
    before = resident()
    with peak_memory(CPU) as peak:
        action()
        return peak() - before


def sizes(run: RunConfig) -> dict[str, int]:
    """Return the bytes of each unsharded tensor in float32."""
    config = folder_config(run)
    return {name: 4 * math.prod(layout.shape) for name, layout in tensors_of(config).items()}


def folder_config(run: RunConfig) -> ModelFolderConfig:
    return ModelFolderConfig(model=run.model, vocab_size=VOCAB_SIZE, eos=2, segment_length=8, cache_length=8, step=1)


def measure_export(run: RunConfig, folder: Path) -> int:
    with distributed_session(tensor=run.parallel.tensor) as topology:
        engine = build(run, topology)

        def export() -> None:
            if topology.is_first:
                weight: Any = engine.full_weight
                model_folder.write(folder, ModelSource(folder, folder_config(run), weight, lambda: None))
            else:
                for name in sizes(run):
                    engine.full_weight(name)

        return measured(export)


@pytest.mark.parametrize(
    ("tensor", "data", "zero"), [(2, 1, 1), (1, 2, 3), pytest.param(2, 2, 3, marks=pytest.mark.sweep)]
)
def test_an_export_holds_one_tensor(folder: Path, tensor: int, data: int, zero: int) -> None:
    """And two shards of it under tensor parallelism, on the rank that writes; the others less."""
    run = make_run(folder, tensor=tensor, data=data, zero=zero, model=MODEL)
    peaks = run_ranks(tensor * data, measure_export, run, folder / "model")
    largest = max(sizes(run).values())
    allowed = largest + (2 * largest // tensor if tensor > 1 else 0) + EXTRA
    assert allowed < sum(sizes(run).values()) / 4
    assert max(peaks) < allowed, f"{[peak / 2**20 for peak in peaks]} MB; {allowed / 2**20} MB are allowed"
