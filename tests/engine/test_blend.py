"""Any grid computes of a blend what one process computes, and the losses of its sources add up to the loss."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_style.config.run import RunConfig
from megatron_style.data.corpus import open_corpus
from megatron_style.engine.build import build_engine
from megatron_style.engine.gradients import accumulate_gradients
from megatron_style.engine.session import distributed_session
from megatron_style.model.memory import Memory
from megatron_style.model.shortformer import Output
from megatron_style.parallel.local_ranks import run_ranks
from megatron_style.schedule.stages import StageSchedule, StepPlan
from tests.support.blends import SIZES, blend_in, with_data, write_blend
from tests.support.models import MODELS, model_config
from tests.support.runs import tiny_run
from tests.support.training import VOCAB_SIZE, History, train_on, write_ds_config

pytestmark = pytest.mark.slow
TOKENS = 288  # over all data-parallel ranks
GRIDS: dict[str, dict[str, Any]] = {
    "DP2": {"data": 2},
    "DP3": {"data": 3, "zero": 1},  # a source ends in the middle of the second rank
    "accumulation": {"accumulation": 3},
    "DP2-ZeRO2": {"data": 2, "accumulation": 3, "zero": 2},
    "TP2": {"tensor": 2, "recompute": True},
    "DP2-ZeRO3": {"data": 2, "zero": 3},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("blend")
    write_blend(path)
    return path


def run_on(
    folder: Path,
    *,
    data: int = 1,
    tensor: int = 1,
    accumulation: int = 1,
    zero: int = 0,
    recompute: bool = False,
    model: str = "shortformer",
) -> RunConfig:
    """Return a run through a stage switch and several epochs of the smaller source."""
    stages = [
        {"segment_length": length, "steps": 6, "micro_rows": TOKENS // data // length // accumulation}
        for length in (8, 16)
    ]
    run = tiny_run(
        stages=stages,
        tokens_per_batch=TOKENS // data,
        model=model_config(model).model.as_data(),
        data={"valid": str(folder / "valid"), "vocab_size": VOCAB_SIZE},
        optimizer={"name": "nag", "clip_norm": 0.5, "learning_rate": {"peak": 0.3, "warmup_steps": 2}},
        parallel={"tensor": tensor, "recompute": recompute},
        deepspeed=str(write_ds_config(folder, zero_optimization={"stage": zero})) if zero else None,
    )
    return with_data(run, train=blend_in(folder))


@cache
def one_process(folder: Path, model: str = "shortformer") -> History:
    return train_on(1, run_on(folder, model=model))


def expect_same(history: History, expected: History) -> None:
    np.testing.assert_allclose(history.losses, expected.losses, rtol=2e-6)
    np.testing.assert_allclose(history.by_source, expected.by_source, rtol=2e-6)
    np.testing.assert_allclose(history.norms, expected.norms, rtol=2e-5)
    for name, weight in expected.weights.items():
        np.testing.assert_allclose(history.weights[name], weight, atol=2e-6, err_msg=name)


@pytest.mark.parametrize("grid", GRIDS)
def test_a_grid_trains_a_blend_like_one_process(folder: Path, grid: str) -> None:
    settings = GRIDS[grid]
    world = settings.get("data", 1) * settings.get("tensor", 1)
    expect_same(train_on(world, run_on(folder, **settings)), one_process(folder))


@pytest.mark.parametrize("model", ["baseline", "compressive", "transformer-xl", "routing"])
def test_models_of_all_kinds_train_on_a_blend(folder: Path, model: str) -> None:
    assert model in MODELS
    expect_same(train_on(2, run_on(folder, data=2, model=model)), one_process(folder, model))


def test_the_losses_of_the_sources_add_up_to_the_loss(folder: Path) -> None:
    run = run_on(folder)
    schedule = StageSchedule(run, corpus_tokens=tuple(SIZES.values()), data_parallel=1)
    history = one_process(folder)
    opened = 0
    for step, (loss, by_source) in enumerate(zip(history.losses, history.by_source, strict=True)):
        plan = schedule.plan(step)
        opened += plan.opens_lanes
        assert np.dot(by_source, plan.source_tokens) / plan.tokens == pytest.approx(loss, rel=1e-6)
    assert opened > 3  # epochs and a stage


def test_a_list_of_one_source_trains_like_a_path(folder: Path) -> None:
    path = str(folder / "news" / "train")
    run = run_on(folder)
    listed = train_on(1, with_data(run, train=[{"path": path, "weight": 5}]))
    alone = train_on(1, with_data(run, train=path))
    assert listed.losses == alone.losses
    assert listed.by_source == []
    assert all(torch.equal(weight, listed.weights[name]) for name, weight in alone.weights.items())


def measure_rows(run: RunConfig) -> list[tuple[list[float], list[float]]]:
    """Return the reported losses of each source, and those computed row by row, of every step."""
    with distributed_session(tensor=1) as topology:
        corpus = open_corpus(run.data)
        schedule = StageSchedule(run, corpus_tokens=corpus.train_tokens, data_parallel=topology.data.size)
        engine = build_engine(run, schedule, corpus.vocab_size, topology)
        outputs: list[Output] = []
        forward = engine.forward
        engine.forward = lambda *args: outputs.append(forward(*args)) or outputs[-1]  # type: ignore[func-returns-value, method-assign]
        caches: tuple[Memory, ...] = ()
        found = []
        for step in range(schedule.total_steps):
            plan = schedule.plan(step)
            outputs.clear()
            loss, caches = accumulate_gradients(engine, corpus, plan, caches, topology, run.seed)
            engine.update(0.1)
            assert loss.by_source is not None
            found.append((loss.by_source.tolist(), row_by_row(plan, outputs)))
        return found


def row_by_row(plan: StepPlan, outputs: list[Output]) -> list[float]:
    sums = [0.0] * len(SIZES)
    counts = [0] * len(SIZES)
    for micro, output in enumerate(outputs):
        reading = plan.read(data_rank=0, micro=micro)
        for nll, length, source in zip(output.nll, reading.lengths, reading.sources, strict=True):
            sums[source] += nll[:length].double().sum().item()
            counts[source] += int(length)
    return [total / count for total, count in zip(sums, counts, strict=True)]


def test_the_loss_of_a_source_is_the_mean_over_its_tokens(folder: Path) -> None:
    for reported, expected in run_ranks(1, measure_rows, run_on(folder, accumulation=3))[0]:
        np.testing.assert_allclose(reported, expected, rtol=1e-6)
