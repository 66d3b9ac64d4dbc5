"""No rank holds more of a model than its shard and a little: neither when it is built nor when it is exported."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megatron_style.config.model import ModelFolderConfig
from megatron_style.config.run import RunConfig
from megatron_style.engine import build as build_module
from megatron_style.engine.build import build_engine
from megatron_style.engine.engine import TrainingEngine
from megatron_style.engine.session import distributed_session
from megatron_style.formats import model_folder
from megatron_style.formats.source import ModelSource, tensors_of
from megatron_style.formats.transfer import return_freed_memory
from megatron_style.model.shortformer import Shortformer
from megatron_style.parallel.device.peak_memory import peak_memory
from megatron_style.parallel.local_ranks import run_ranks
from megatron_style.parallel.sharding import initialise, layouts_of
from megatron_style.parallel.topology import Axis
from megatron_style.schedule.stages import StageSchedule
from tests.support.models import model_config
from tests.support.resuming import make_run
from tests.support.tiny import weights_of
from tests.support.training import full_weights

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
                weight: Any = engine.state.full_weight
                model_folder.write(folder, ModelSource(folder, folder_config(run), weight, lambda: None))
            else:
                for name in sizes(run):
                    engine.state.full_weight(name)

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


def build_alone(run: RunConfig, topology: Any) -> list[object]:
    """Make the model's weights as `build_engine` does, without DeepSpeed's optimizer, which makes copies of its own."""
    kept: list[object] = []
    with patch.object(build_module, "TrainingEngine", lambda model, *_, **__: kept.append(model)):
        build(run, topology)
    return kept


def warm_up(run: RunConfig, topology: Any) -> None:
    """Build a tiny model first, so that the pages of libraries are in memory already, and let glibc return these small
    tensors as it always returns those above 32 MB."""
    return_freed_memory()
    tiny = run.as_data() | {"model": run.as_data()["model"] | {"layers": 1, "hidden_size": 16, "ffn_size": 16}}
    build(RunConfig.parse(tiny, source="test"), topology)


def measure_build(run: RunConfig) -> int:
    with distributed_session(tensor=run.parallel.tensor) as topology:
        warm_up(run, topology)
        kept: list[object] = []
        return measured(lambda: kept.append(build_alone(run, topology)))


@pytest.mark.parametrize(("tensor", "data"), [(1, 4), pytest.param(2, 2, marks=pytest.mark.sweep)])
def test_a_partitioned_model_is_built_one_parameter_at_a_time(folder: Path, tensor: int, data: int) -> None:
    """A rank holds its shard and one layer; here four ranks together hold the model once."""
    run = make_run(folder, tensor=tensor, data=data, zero=3, model=MODEL)
    peaks = run_ranks(tensor * data, measure_build, run)
    model = sum(sizes(run).values())
    layer = sum(size for name, size in sizes(run).items() if name.startswith("blocks.0."))
    allowed = model // (tensor * data) + layer // tensor + EXTRA
    assert allowed < model / 2
    assert max(peaks) < allowed, f"{[peak / 2**20 for peak in peaks]} MB; {allowed / 2**20} MB are allowed"


def measure_engine(run: RunConfig) -> tuple[int, int]:
    """Return the peak of a build with DeepSpeed's engine, and what is held after it."""
    with distributed_session(tensor=run.parallel.tensor) as topology:
        warm_up(run, topology)
        before = resident()
        kept: list[object] = []
        peak = measured(lambda: kept.append(build(run, topology)))
        return peak, resident() - before


def test_an_engine_needs_little_more_than_it_keeps(folder: Path) -> None:
    """DeepSpeed copies its shard a few times; no copy is of the model."""
    run = make_run(folder, data=4, zero=3, model=MODEL)
    model = sum(sizes(run).values())
    for peak, after in run_ranks(4, measure_engine, run):
        assert peak < after + model // 4 + EXTRA, f"{peak / 2**20} MB at most, {after / 2**20} MB after"
        assert peak < model


def built_weights(run: RunConfig, vocab_size: int) -> dict[str, torch.Tensor]:
    with distributed_session(tensor=run.parallel.tensor) as topology:
        schedule = StageSchedule(run, corpus_tokens=1200, data_parallel=topology.data.size)
        return full_weights(build_engine(run, schedule, vocab_size, topology))


@pytest.mark.parametrize(
    ("name", "tensor", "data", "zero", "half"),
    [
        ("shortformer", 2, 2, 3, True),
        ("routing", 1, 2, 3, False),
        pytest.param("transformer-xl-adaptive", 2, 1, 3, False, marks=pytest.mark.sweep),
        pytest.param("compressive", 2, 2, 3, True, marks=pytest.mark.sweep),
        pytest.param("routing", 2, 1, 3, True, marks=pytest.mark.sweep),
        pytest.param("shortformer-untied", 1, 2, 1, True, marks=pytest.mark.sweep),
    ],
)
def test_every_grid_starts_from_the_same_numbers(
    folder: Path, name: str, tensor: int, data: int, zero: int, half: bool
) -> None:
    """Bit for bit those of one process, rounded where the run computes in bf16."""
    config = model_config(name)
    model = Shortformer(config.model, config.vocab_size)
    initialise(model, 1, Axis())
    expected = weights_of(model)
    model_data = config.model.as_data()
    run = make_run(folder, tensor=tensor, data=data, zero=zero, half=half, model=model_data)
    found = run_ranks(tensor * data, built_weights, run, config.vocab_size)[0]
    assert found.keys() == expected.keys()
    for key, weight in expected.items():
        is_rounded = half and key in layouts_of(model)
        assert torch.equal(found[key].float(), weight.bfloat16().float() if is_rounded else weight), key
