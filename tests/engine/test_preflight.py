"""The preflight has the peak memory of the steps that follow."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest

from megatron_style.config.run import RunConfig
from megatron_style.data.corpus import open_corpus
from megatron_style.engine.build import build_engine
from megatron_style.engine.gradients import accumulate_gradients
from megatron_style.engine.preflight import preflight
from megatron_style.engine.session import distributed_session
from megatron_style.model.memory import Memory
from megatron_style.parallel.local_ranks import run_ranks
from megatron_style.rehearsal.live_bytes import LiveBytes
from megatron_style.schedule.stages import StageSchedule
from tests.support.runs import tiny_run
from tests.support.training import VOCAB_SIZE, write_corpus, write_ds_config


def peaks(run: RunConfig) -> tuple[int, int]:
    """Bytes of tensors at the peak of the preflight, and of steps 2 and 3."""
    with LiveBytes() as live, distributed_session(tensor=run.parallel.tensor) as topology:
        corpus = open_corpus(run.data)
        schedule = StageSchedule(run, corpus_tokens=corpus.train_tokens, data_parallel=topology.data.size)
        engine = build_engine(run, schedule, corpus.vocab_size, topology)
        gc.collect()  # what waits for it would be counted by chance
        live.mark()
        list(preflight(engine, schedule.stages))
        rehearsed = live.peak
        caches: tuple[Memory, ...] = ()
        for step in range(3):
            if step == 1:
                gc.collect()
                live.mark()
            _, caches = accumulate_gradients(engine, corpus, schedule.plan(step), caches, topology, run.seed)
            engine.update(0.1)
        return rehearsed, live.peak


@pytest.mark.slow
@pytest.mark.parametrize(
    "parallel",
    [
        {"sequence": True, "cache": "host"},
        pytest.param({}, marks=pytest.mark.sweep),
        pytest.param({"sequence": True, "recompute": True}, marks=pytest.mark.sweep),
    ],
    ids=str,
)
def test_it_knows_what_is_split(tmp_path: Path, parallel: dict[str, Any]) -> None:
    write_corpus(tmp_path, tokens=40_000)
    run = tiny_run(
        stages=[{"segment_length": 32, "steps": 4, "micro_rows": 8}],
        tokens_per_batch=1024,
        model=tiny_run().model.as_data() | {"layers": 4, "hidden_size": 64, "heads": 4, "ffn_size": 256},
        data={"train": str(tmp_path / "train"), "valid": str(tmp_path / "valid"), "vocab_size": VOCAB_SIZE},
        parallel={"tensor": 2} | parallel,
    )
    for rehearsed, stepped in run_ranks(2, peaks, run):
        assert rehearsed == pytest.approx(stepped, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("accumulation", [1, pytest.param(4, marks=pytest.mark.sweep), 16])
@pytest.mark.parametrize(
    ("zero", "half", "optimizer"),
    [
        (1, True, "adamw"),
        (0, False, "adamw"),
        pytest.param(1, False, "nag", marks=pytest.mark.sweep),
        pytest.param(2, True, "nag", marks=pytest.mark.sweep),
        pytest.param(2, False, "adamw", marks=pytest.mark.sweep),
        pytest.param(3, True, "adamw", marks=pytest.mark.sweep),
        pytest.param(3, False, "nag", marks=pytest.mark.sweep),
    ],
)
def test_it_predicts_the_peak_of_the_steps(
    tmp_path: Path, zero: int, half: bool, optimizer: str, accumulation: int
) -> None:
    write_corpus(tmp_path, tokens=40_000)
    model: dict[str, Any] = {"layers": 4, "hidden_size": 64, "heads": 4, "ffn_size": 256}
    ds: dict[str, Any] = {"zero_optimization": {"stage": zero}, "bf16": {"enabled": half}}
    if half:
        ds["data_types"] = {"grad_accum_dtype": "fp32"}
    if zero > 1 or (zero == 1 and not half):
        ds["zero_optimization"]["reduce_bucket_size"] = 10_000
    run = tiny_run(
        stages=[{"segment_length": 32, "steps": 4, "micro_rows": 32 // accumulation}],
        tokens_per_batch=1024,
        model=tiny_run().model.as_data() | model,
        data={"train": str(tmp_path / "train"), "valid": str(tmp_path / "valid"), "vocab_size": VOCAB_SIZE},
        optimizer={"name": optimizer, "weight_decay": 0.1, "learning_rate": {"peak": 0.1}},
        deepspeed=str(write_ds_config(tmp_path, **ds)),
    )
    for rehearsed, stepped in run_ranks(2, peaks, run):
        assert rehearsed == pytest.approx(stepped, rel=0.05)
