"""The optimizers and the learning rate are the reference's."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from megatron_style.config.run import LearningRateConfig
from megatron_style.runtime.optimizer import NAG
from megatron_style.schedule.learning_rate import learning_rate_at
from tests.support.oracle import needs_oracle, recorded


@needs_oracle
def test_nag_takes_the_references_steps() -> None:
    """The record is float32; in float64 every step lands on it to float32's last digit, also the velocity -lr u."""
    record = recorded("nag_steps.json")
    param = torch.nn.Parameter(torch.tensor(record["param0"], dtype=torch.float64))
    optimizer = NAG([param], lr=0.0, momentum=record["momentum"])
    for step in record["steps"]:
        optimizer.param_groups[0]["lr"] = step["lr"]
        param.grad = torch.tensor(step["grad"], dtype=torch.float64)
        optimizer.step()
        velocity = -step["lr"] * optimizer.state[param]["momentum_buffer"]
        torch.testing.assert_close(param.detach(), torch.tensor(step["param_after"]).double(), rtol=3e-7, atol=3e-8)
        torch.testing.assert_close(velocity, torch.tensor(step["momentum_after"]).double(), rtol=3e-7, atol=3e-8)


def test_nag_is_the_lr_corrected_velocity_form() -> None:
    """The reference's formula, step by step, under a learning rate that jumps."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(7, generator=generator, dtype=torch.float64)
    param, p, v, mu, lr_old = torch.nn.Parameter(start.clone()), start.clone(), torch.zeros(7).double(), 0.9, 0.1
    optimizer = NAG([param], lr=0.0, momentum=mu)
    for lr in (0.01, 0.5, 0.5, 0.02, 0.3):
        gradient = torch.randn(7, generator=generator, dtype=torch.float64)
        correction = lr / lr_old
        p += mu**2 * correction * v - (1 + mu) * lr * gradient
        v = mu * correction * v - lr * gradient
        lr_old = lr
        optimizer.param_groups[0]["lr"] = lr
        param.grad = gradient
        optimizer.step()
        torch.testing.assert_close(param.detach(), p, rtol=1e-13, atol=1e-13)


def test_nag_decays_weights_apart_from_the_gradient() -> None:
    param = torch.nn.Parameter(torch.ones(3).double())
    optimizer = NAG([param], lr=0.5, momentum=0.9, weight_decay=0.1)
    param.grad = torch.zeros(3).double()
    optimizer.step()
    torch.testing.assert_close(param.detach(), torch.full((3,), 0.95).double())


@needs_oracle
@pytest.mark.parametrize("name", ["paper", "restart"])
def test_the_learning_rate_is_the_references_bit_for_bit(name: str) -> None:
    record = recorded("lr_schedule.json")
    settings = record[f"{name}_config"]
    config = LearningRateConfig(
        peak=settings["max_lr"],
        floor=settings.get("lr", 1e-4),
        warmup_steps=settings["warmup_updates"],
        warmup_from=settings["warmup_init_lr"],
        period_steps=int(settings["lr_period_updates"]),
        period_growth=settings["t_mult"],
        shrink=settings["lr_shrink"],
    )
    for step, expected in record[name]:
        assert learning_rate_at(step, config, settings["max_update"]) == expected, step


def test_one_period_reaches_the_floor_at_the_last_step() -> None:
    config = LearningRateConfig(peak=1.0, floor=0.1, warmup_steps=10)
    rates = [learning_rate_at(step, config, 110) for step in range(111)]
    assert rates[10] == max(rates) == 1.0
    assert rates[109] == pytest.approx(0.1, abs=1e-3)
    assert all(a >= b for a, b in pairwise(rates[10:110]))
