"""The parts of a step's time: the arithmetic that kernels execute, and the messages that no computation hides."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megatron_style.config.model import ModelConfig
from megatron_style.planning.hardware import gpu_named
from megatron_style.planning.setup import Kernels, Setup, Sharding
from megatron_style.planning.timing import Machine, estimate_time, executed_flops, flops_of_token
from megatron_style.schedule.stages import Stage

STAGE = Stage(0, segment_length=64, cache_length=64, rows=16, micro_rows=4)
MACHINE = Machine(gpu_named("a100-80gb"), 0.4)


def setup_with(**changes: Any) -> Setup:
    sizes = {"layers": 2, "hidden_size": 64, "heads": 4, "ffn_size": 256, "vocabulary": {"kind": "tied"}}
    sharding = Sharding(zero_stage=1, precision="bf16", overlaps=True)
    setup = Setup(ModelConfig.parse(sizes, source="model"), 1000, (1.0,), sharding, data=64)
    return replace(setup, sharding=replace(sharding, **changes))


@pytest.mark.parametrize("cache_length", [0, 64])
def test_fused_kernels_skip_what_the_mask_hides_and_plain_ones_do_not(cache_length: int) -> None:
    setup, stage = setup_with(), replace(STAGE, cache_length=cache_length)
    tokens = stage.rows * stage.segment_length
    assert executed_flops(setup, stage) == pytest.approx(tokens * flops_of_token(setup, stage))
    plain = replace(setup, kernels=Kernels(fused_attention=False))
    assert executed_flops(plain, stage) == pytest.approx(tokens * flops_of_token(setup, stage, causal_once=False))


def hidden_share(setup: Setup, stage: Stage) -> float:
    """Return the arithmetic behind which messages are hidden, as a share of all."""
    time = estimate_time(setup, stage, MACHINE)
    return (time.data - time.exposed) / time.compute


def test_zero_1_hides_messages_during_its_last_micro_batch_only() -> None:
    assert hidden_share(setup_with(), STAGE) == pytest.approx(2 / 3 / STAGE.accumulation)
    assert hidden_share(setup_with(zero_stage=2), STAGE) == pytest.approx(2 / 3)
    assert hidden_share(setup_with(overlaps=False), STAGE) == 0


def test_float32_gradients_at_zero_1_in_bf16_cannot_overlap() -> None:
    assert hidden_share(setup_with(full_gradients=True), STAGE) == 0
    assert hidden_share(setup_with(full_gradients=True, zero_stage=2), STAGE) == pytest.approx(2 / 3)
