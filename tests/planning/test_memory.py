"""Planned bytes against bytes counted over a real step of the real engine."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from megatron_style.config.ds_file import read_ds_file
from megatron_style.config.run import CachePlace, RunConfig
from megatron_style.parallel.loss import WIDENED
from megatron_style.planning.memory import MemoryEstimate, estimate_memory
from megatron_style.planning.setup import Kernels, setup_of, sharding_of
from megatron_style.planning.text import text_facts
from megatron_style.schedule.stages import resolve_stage
from tests.support.measured_step import Measured, measure_step
from tests.support.runs import tiny_run
from tests.support.training import write_corpus, write_ds_config

VOCAB_SIZE, TOKENS = 2000, 1024
ADAPTIVE = {"kind": "adaptive", "cutoffs": [1200, 1700], "factor": 4}
COMPRESSED = {"compressed": 48, "rate": 4}
DROPOUT = {"hidden": 0.3, "attention": 0.1, "activation": 0.1, "softmax": 0.2}

CLUSTERS = {"heads": 2, "clusters": 4, "window": 16, "local": 16}
ROUTED: dict[str, Any] = {"cache": False, "positions": "added", "routing": CLUSTERS}


@dataclass(frozen=True)
class Case:
    """One way to train: a model, a grid, a ds_config and an optimizer."""

    zero: int = 0
    data: int = 1
    tensor: int = 1
    optimizer: str = "nag"
    half: bool = False
    full_gradients: bool = False  # in half precision: micro-batches add up in float32
    offload: bool = False  # optimizer and weights, where the ZeRO stage can
    bucket: int = 1000  # elements that are reduced at once; with more of them, while the backward pass runs
    recompute: bool = False
    sequence: bool = False
    cache: CachePlace = "device"
    segment_length: int = 64
    cache_length: int | None = None
    model: dict[str, Any] = field(default_factory=dict)


CASES = {
    "shortformer": Case(),
    "recompute": Case(zero=1, recompute=True, model={"layers": 6}),
    "tied, tensor parallel": Case(tensor=2, model={"vocabulary": {"kind": "tied"}}, optimizer="adamw"),
    "zero 2 in half precision": Case(zero=2, data=2, half=True, model={"vocabulary": {"kind": "tied"}}),
    "sequence parallel": Case(zero=1, tensor=2, sequence=True, model={"layers": 6}),
    "zero 1, float32 gradients": Case(zero=1, data=2, half=True, full_gradients=True, optimizer="adamw"),
}
MORE_CASES = {
    "sequence parallel, four ranks": Case(tensor=4, sequence=True, model={"layers": 6}),
    "sequence parallel, recompute": Case(zero=1, tensor=2, sequence=True, recompute=True, model={"layers": 6}),
    "sequence parallel, recompute, four ranks": Case(tensor=4, sequence=True, recompute=True, model={"layers": 6}),
    "sequence parallel, dropout": Case(zero=1, tensor=2, sequence=True, model={"dropout": DROPOUT}),
    "sequence parallel, relative": Case(tensor=2, sequence=True, model={"positions": "relative", "norm": "after"}),
    "sequence parallel, compressive": Case(
        tensor=2, sequence=True, model={"positions": "relative", "memory": COMPRESSED}
    ),
    "sequence parallel, routing": Case(tensor=2, sequence=True, model=ROUTED),
    "sequence parallel, half precision": Case(zero=1, tensor=4, sequence=True, half=True, model={"layers": 6}),
    "host": Case(cache="host", model={"layers": 6}, cache_length=128),
    "host, sequence parallel, recompute": Case(
        tensor=2, cache="host", sequence=True, recompute=True, model={"layers": 6}, cache_length=128
    ),
    "tensor parallel, another cache": Case(tensor=4, cache_length=128),
    "tensor parallel, recompute, another cache": Case(tensor=4, recompute=True, cache_length=128, model={"layers": 6}),
    "zero 1 in half precision": Case(zero=1, data=2, half=True, optimizer="adamw"),
    "zero 1, float32 gradients, tensor parallel": Case(zero=1, tensor=2, half=True, full_gradients=True),
    "zero 2, float32 gradients": Case(zero=2, data=2, half=True, full_gradients=True, optimizer="adamw"),
    "zero 3, float32 gradients": Case(zero=3, data=2, half=True, full_gradients=True, optimizer="adamw"),
    "zero 3, float32 gradients, tensor parallel": Case(zero=3, tensor=2, half=True, full_gradients=True),
    "zero 2, offloaded": Case(zero=2, data=2, half=True, full_gradients=True, offload=True),
    "zero 3, offloaded": Case(zero=3, data=2, half=True, full_gradients=True, offload=True, optimizer="adamw"),
    "zero 0 on two ranks": Case(data=2, cache_length=128),
    "baseline": Case(model={"cache": False, "positions": "added"}, optimizer="adamw"),
    "infused, no cache": Case(zero=1, model={"cache": False}),
    "added, cache": Case(zero=1, data=2, model={"positions": "added"}, cache_length=32),
    "zero 2": Case(zero=2, data=2, optimizer="adamw"),
    "zero 3": Case(zero=3, data=2, optimizer="adamw"),
    "zero 3 in half precision": Case(zero=3, data=2, optimizer="adamw", half=True),
    "adaptive, tensor parallel": Case(zero=1, tensor=2, segment_length=128, model={"heads": 8}),
    "recompute, tensor parallel, no cache": Case(
        zero=1, tensor=2, recompute=True, model={"layers": 6, "cache": False}, optimizer="adamw"
    ),
    "dropout": Case(zero=1, model={"dropout": DROPOUT}),
    "sandwich": Case(zero=1, model={"layers": 4, "sandwich": 2}),
    "sandwich, recompute": Case(zero=1, recompute=True, model={"layers": 6, "sandwich": 3}),
    "norm after": Case(zero=1, model={"norm": "after"}),
    "relative": Case(zero=1, model={"positions": "relative"}),
    "relative, norm after, tensor parallel": Case(tensor=2, model={"positions": "relative", "norm": "after"}),
    "relative, dropout": Case(zero=1, model={"positions": "relative", "dropout": DROPOUT}),
    "relative, recompute": Case(zero=1, recompute=True, model={"positions": "relative", "layers": 6}),
    "compressive": Case(zero=1, model={"positions": "relative", "norm": "after", "memory": COMPRESSED}),
    "compressive, tensor parallel": Case(tensor=2, model={"positions": "relative", "memory": COMPRESSED}),
    "compressive, recompute": Case(
        zero=1, recompute=True, model={"positions": "relative", "layers": 6, "memory": COMPRESSED}
    ),
    "compressive, mean": Case(zero=1, model={"positions": "relative", "memory": COMPRESSED | {"function": "mean"}}),
    "compressive, infused": Case(zero=1, model={"memory": COMPRESSED}, cache_length=128),
    "compressive, infused, recompute": Case(zero=1, recompute=True, model={"layers": 6, "memory": COMPRESSED}),
    "routing": Case(zero=1, model=ROUTED),
    "routing, tensor parallel, recompute": Case(tensor=2, recompute=True, model=ROUTED | {"layers": 6}),
    "routing, dropout": Case(zero=1, model=ROUTED | {"dropout": DROPOUT}),
    "routing from the third layer on": Case(
        zero=1, segment_length=256, model=ROUTED | {"routing": CLUSTERS | {"first_layer": 2}}
    ),
    "projections both": Case(zero=1, model={"vocabulary": ADAPTIVE | {"biases": True, "projections": "both"}}),
    "projections none": Case(
        zero=1, model={"vocabulary": ADAPTIVE | {"biases": True, "factor": 1, "projections": "none"}}
    ),
    "long": Case(segment_length=512, model={"layers": 2, "ffn_size": 256, "vocabulary": {"kind": "untied"}}),
}


def run_of(case: Case, folder: Path) -> RunConfig:
    write_corpus(folder, tokens=10 * TOKENS, vocab_size=VOCAB_SIZE)
    zero: dict[str, Any] = {"stage": case.zero}
    zero |= {"stage3_param_persistence_threshold": 1000} if case.zero == 3 else {}
    if case.zero > (1 if case.full_gradients and not case.offload else 0):  # there are no buckets otherwise
        zero |= {"reduce_bucket_size": case.bucket, "overlap_comm": case.bucket > 1000}
    zero |= {"offload_optimizer": {"device": "cpu"}} if case.offload else {}
    zero |= {"offload_param": {"device": "cpu"}} if case.offload and case.zero == 3 else {}
    settings = {"zero_optimization": zero} | ({"bf16": {"enabled": True}} if case.half else {})
    settings |= {"data_types": {"grad_accum_dtype": "fp32"}} if case.full_gradients else {}
    model = {"layers": 4, "hidden_size": 128, "heads": 4, "ffn_size": 512, "vocabulary": ADAPTIVE}
    stage = {"segment_length": case.segment_length, "steps": 4, "micro_rows": TOKENS // case.segment_length // 2}
    return tiny_run(
        stages=[stage | ({"cache_length": case.cache_length} if case.cache_length else {})],
        tokens_per_batch=TOKENS,
        model=model | case.model,
        data={"train": str(folder / "train"), "valid": str(folder / "valid"), "vocab_size": VOCAB_SIZE},
        optimizer={"name": case.optimizer},
        parallel={
            "tensor": case.tensor,
            "recompute": case.recompute,
            "sequence": case.sequence,
            "cache": case.cache,
        },
        deepspeed=str(write_ds_config(folder, **settings)),
    )


def measured_and_planned(case: Case, folder: Path) -> tuple[Measured, MemoryEstimate]:
    run = run_of(case, folder)
    measured = measure_step(case.data * case.tensor, run)
    facts, stage = text_facts(run), resolve_stage(run, 0)
    is_plain = run.model.routing is not None and run.model.dropout.attention > 0  # no kernel for it drops on a CPU
    on_cpu = Kernels(fused_attention=not is_plain, byte_masks=False, widened_scores=2**18)
    sharding = sharding_of(run, read_ds_file(run.deepspeed))
    setup = setup_of(run, facts, sharding, gpus=case.data * case.tensor)
    return measured, estimate_memory(replace(setup, kernels=on_cpu), stage)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*CASES, *(pytest.param(name, marks=pytest.mark.sweep) for name in MORE_CASES)])
def test_plans_are_within_a_tenth_of_what_is_measured(name: str, tmp_path: Path) -> None:
    measured, plan = measured_and_planned((CASES | MORE_CASES)[name], tmp_path)
    states = plan.states
    # On a CPU, the host's memory and the device's are one.
    held = states.weights + states.gradients + states.optimizer + states.host
    assert held == pytest.approx(measured.states, rel=0.1)
    assert states.buffers + plan.activations.peak == pytest.approx(measured.activations, rel=0.1)
    assert plan.total + states.host + plan.host_caches == pytest.approx(measured.total, rel=0.1)


def test_the_plan_widens_as_many_logits_as_the_loss_does() -> None:
    assert Kernels().widened_scores == WIDENED


@pytest.mark.sweep
@pytest.mark.parametrize("zero", [1, 2])
def test_reductions_that_overlap_need_two_buckets(zero: int, tmp_path: Path) -> None:
    """Between micro-batches the buckets count as states, so only the peak can be compared."""
    measured, plan = measured_and_planned(Case(zero=zero, data=2, half=True, bucket=500_000), tmp_path)
    assert plan.states.buffers > 2 * 2 * 500_000
    assert plan.total == pytest.approx(measured.total, rel=0.1)
