"""A rehearsed rank against a real one, and what a rehearsal must find.

Each rehearsal runs in its own process, because it changes DeepSpeed's global state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_style.base.errors import UserError
from megatron_style.config.run import RunConfig
from megatron_style.config.run_file import load_run
from megatron_style.model.positions import SinusoidalPositions
from megatron_style.parallel.device.peak_memory import peak_memory
from megatron_style.parallel.layers import VocabParallelTable
from megatron_style.rehearsal.rehearsal import Rehearsal, StageRehearsal, rehearse
from tests.support.in_child import in_child
from tests.support.measured_step import measure_step, products_as_on_a_gpu
from tests.support.runs import tiny_run
from tests.support.training import write_corpus, write_ds_config

RUNS = Path(__file__).parents[2] / "run_configs"
VOCAB_SIZE, TOKENS = 2000, 1024
PLENTY = 2.0**40


@pytest.fixture(autouse=True)
def _products_as_on_a_gpu() -> Iterator[None]:
    with products_as_on_a_gpu():
        yield


@dataclass(frozen=True)
class Case:
    zero: int
    half: bool
    recompute: bool

    def __str__(self) -> str:
        return f"ZeRO {self.zero}, {'bf16' if self.half else 'fp32'}{', recompute' if self.recompute else ''}"


CASES = [Case(1, half=True, recompute=False), Case(2, half=False, recompute=True), Case(3, half=True, recompute=True)]
ALL_CASES = [Case(zero, half, again) for zero in (1, 2, 3) for half in (False, True) for again in (False, True)]


def small_run(
    folder: Path, case: Case, *, lengths: Sequence[int] = (64,), parallel: Mapping[str, Any] = {}, **model: Any
) -> RunConfig:
    write_corpus(folder, tokens=10 * TOKENS, vocab_size=VOCAB_SIZE)
    zero = {
        "stage": case.zero,
        "reduce_bucket_size": 100_000,
    }
    if case.zero == 3:
        zero |= {
            "stage3_param_persistence_threshold": 1000,
            "stage3_prefetch_bucket_size": 10_000,
            "stage3_max_live_parameters": 50_000,
            "stage3_max_reuse_distance": 0,
        }
    settings = {"zero_optimization": zero} | ({"bf16": {"enabled": True}} if case.half else {})
    vocabulary = {"kind": "adaptive", "cutoffs": [1200, 1700], "factor": 4}
    return tiny_run(
        stages=[{"segment_length": length, "steps": 4, "micro_rows": TOKENS // length // 2} for length in lengths],
        tokens_per_batch=TOKENS,
        model={"layers": 2, "hidden_size": 128, "heads": 4, "ffn_size": 512, "vocabulary": vocabulary} | model,
        data={"train": str(folder / "train"), "valid": str(folder / "valid"), "vocab_size": VOCAB_SIZE},
        parallel={"tensor": 2, "recompute": case.recompute, **parallel},
        optimizer={"name": "adamw"},
        deepspeed=str(write_ds_config(folder, **settings)),
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "tensor", "data"),
    [(CASES[1], 1, 2), (CASES[2], 2, 2)]
    + [pytest.param(case, 2, 2, marks=pytest.mark.sweep) for case in ALL_CASES if case != CASES[2]],
    ids=str,
)
def test_the_last_rank_needs_what_it_really_needs(case: Case, tensor: int, data: int, tmp_path: Path) -> None:
    """Compare a whole step of two micro-batches with caches. One meter counts both."""
    run = small_run(tmp_path, case, parallel={"tensor": tensor})
    ranks = tensor * data
    (stage,) = in_child(_rehearse, run, ranks, ranks - 1).stages
    measured = measure_step(ranks, run, rank=ranks - 1)
    # gloo copies a bucket to reduce and scatter it, as only ZeRO 3 does: 2% here. NCCL does not.
    assert stage.peak == pytest.approx(measured.total, rel=0.03 if case.zero == 3 else 0.001)


@pytest.mark.slow
@pytest.mark.parametrize("cache", [pytest.param("device", marks=pytest.mark.sweep), "host"])
@pytest.mark.parametrize("case", [CASES[0], pytest.param(CASES[2], marks=pytest.mark.sweep)])
def test_the_same_holds_for_what_is_split(case: Case, cache: str, tmp_path: Path) -> None:
    """A meter of a CPU counts the caches on the host, too; that of the rehearsal does not."""
    run = small_run(tmp_path, case, parallel={"sequence": True, "cache": cache})
    (stage,) = in_child(_rehearse, run, 4, 3).stages
    total = measure_step(4, run, rank=3).total
    of_micro_batch = 3 * TOKENS // 2 * 128 // 2 * 2  # layers, tokens, features of a rank, bytes
    # In the first micro-batch both old ones are on the host; in the second also the first new one.
    on_host = (2 * of_micro_batch, 3 * of_micro_batch) if cache == "host" else (0, 0)
    tolerance = 0.03 if case.zero == 3 else 0.001
    assert any(stage.peak == pytest.approx(total - held, rel=tolerance) for held in on_host)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.sweep)])
def test_the_same_holds_for_a_compressed_memory(ranks: int, tmp_path: Path) -> None:
    memory = {"compressed": 48, "rate": 4}
    run = small_run(tmp_path, CASES[0], positions="relative", memory=memory)
    (stage,) = in_child(_rehearse, run, ranks, ranks - 1).stages
    assert stage.peak == pytest.approx(measure_step(ranks, run, rank=ranks - 1).total, rel=0.001)


@pytest.mark.slow
def test_a_large_run_is_near_its_plan_and_takes_little_memory() -> None:
    """Use two micro-batches. With one, as in the file, the plan is an upper bound: it counts gradients that do not
    exist yet when activations are largest."""
    settings = ["data.vocab_size=10000", "parallel.micro_tokens=8192", "model.layers=6"]
    rehearsal, used = in_child(_rehearse_measured, load_run(RUNS / "shortformer_1b3.yaml", settings), 64, 37)
    assert [each.stage.segment_length for each in rehearsal.stages] == [128, 512, 1024]
    for each in rehearsal.stages:
        assert each.peak == pytest.approx(each.planned, rel=0.035)
    assert used < 2**30 < rehearsal.stages[0].peak / 4  # used includes what this process had before


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("name", "ranks", "rank", "below"), [("shortformer_1b3", 64, 37, 0.2), ("shortformer_13b", 512, 9, 0.03)]
)
def test_the_largest_runs_as_they_are(name: str, ranks: int, rank: int, below: float) -> None:
    run = load_run(RUNS / f"{name}.yaml", ["data.vocab_size=50000"])
    rehearsal, used = in_child(_rehearse_measured, run, ranks, rank)
    assert len(rehearsal.stages) == 3
    for each in rehearsal.stages:
        assert (1 - below) * each.planned <= each.peak <= 1.01 * each.planned
    assert used < 2**30


@pytest.mark.slow
def test_a_wrong_shape_is_found_in_the_stage_that_has_it(tmp_path: Path) -> None:
    rehearsal = in_child(_with_too_few_positions, small_run(tmp_path, CASES[0], lengths=(64, 128)))
    assert [each.stage.segment_length for each in rehearsal.stages] == [64]
    assert rehearsal.failure is not None
    assert rehearsal.failure.startswith("stage 2: 8 x 128 tokens per rank")
    assert "RuntimeError: Attempting to broadcast" in rehearsal.failure


def test_a_tensor_left_on_the_host_is_found(tmp_path: Path) -> None:
    rehearsal = in_child(_with_ids_left_on_the_host, small_run(tmp_path, CASES[0]))
    assert rehearsal.stages == ()
    assert rehearsal.failure is not None
    assert "embedding: one tensor is on the host, another on the GPU" in rehearsal.failure


@pytest.mark.slow
def test_a_run_that_is_too_large_is_refused_with_what_would_fit(tmp_path: Path) -> None:
    hopeless, tight = in_child(_too_large, small_run(tmp_path, CASES[0]))
    settings = ("parallel.sequence to true", "parallel.recompute to true", "parallel.cache to host")
    assert hopeless.remedy == f"set {' and '.join(settings)}"
    assert tight.remedy == "set stages.0.micro_rows to 4"


def test_offloading_is_refused(tmp_path: Path) -> None:
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    run = tiny_run(data={"vocab_size": 37}, deepspeed=str(write_ds_config(tmp_path, zero_optimization=zero)))
    with pytest.raises(UserError, match="offloads to host memory"):
        _rehearse(run, 1, 0)


def _rehearse(run: RunConfig, ranks: int, rank: int, usable: float = PLENTY) -> Rehearsal:
    return rehearse(run, ranks=ranks, rank=rank, usable=usable)


def _too_large(run: RunConfig) -> tuple[StageRehearsal, StageRehearsal]:
    """Return the stage in no memory at all, and in a byte less than it needs."""
    (hopeless,) = _rehearse(run, 4, 0, 1.0).stages
    (tight,) = _rehearse(run, 4, 0, hopeless.peak - 1).stages
    return hopeless, tight


def _rehearse_measured(run: RunConfig, ranks: int, rank: int) -> tuple[Rehearsal, int]:
    """Return the rehearsal and the real memory of its process, in bytes."""
    with peak_memory(torch.device("cpu")) as peak:
        return _rehearse(run, ranks, rank), peak()


def _with_too_few_positions(run: RunConfig) -> Rehearsal:
    """Run out of positions in the second stage: it has 128 + 128 tokens, the first one 64 + 64."""
    real = SinusoidalPositions.forward

    def forward(self: SinusoidalPositions, positions: int) -> Tensor:
        return real(self, min(positions, 200))

    with patch.object(SinusoidalPositions, "forward", forward):
        return _rehearse(run, 4, 3)


def _with_ids_left_on_the_host(run: RunConfig) -> Rehearsal:
    def owned_rows(self: VocabParallelTable, ids: Tensor) -> tuple[Tensor, Tensor]:
        (index,) = torch.where(ids >= 0)
        return index, F.embedding(ids[index], self.weight)

    with patch.object(VocabParallelTable, "owned_rows", owned_rows):
        return _rehearse(run, 4, 3)
