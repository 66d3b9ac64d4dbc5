"""The optimizers and the learning rate are the reference's."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from megatron_style.config.run import LearningRateConfig, OptimizerConfig
from megatron_style.engine.optimizer import NAG, make_optimizer
from megatron_style.parallel.sharding import layout_of
from megatron_style.schedule.learning_rate import learning_rate_at
from tests.support.oracle import needs_oracle, recorded
from tests.support.tiny import tiny_config, tiny_model


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


@pytest.mark.parametrize("kind", ["adaptive", "tied", "untied"])
def test_matrices_decay_and_nothing_else(kind: str) -> None:
    """Not norms, biases and vectors of tokens: what every recipe for AdamW leaves out."""
    config = tiny_config(kind)
    model = tiny_model(config)
    names = {param: name for name, param in model.named_parameters()}
    optimizer = make_optimizer(OptimizerConfig(name="adamw", weight_decay=0.1), model, on_cpu=False)
    decaying, kept = ([names[param] for param in group["params"]] for group in optimizer.param_groups)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert all(name.endswith((".weight", ".projection", "clusters")) for name in decaying)
    assert not any("norm" in name or "table" in name for name in decaying)
    assert all(name.endswith(".bias") or "norm" in name or "table" in name for name in kept)
    assert len(decaying) + len(kept) == len(names)


@pytest.mark.parametrize(
    ("settings", "groups"),
    [
        ({"name": "adamw"}, 1),  # nothing decays: one group
        ({"name": "adamw", "weight_decay": 0.1, "decay": "all"}, 1),
        ({"name": "nag", "weight_decay": 0.1}, 1),  # as in the reference
        ({"name": "nag", "weight_decay": 0.1, "decay": "matrices"}, 2),
    ],
)
def test_what_decays_can_be_chosen(settings: dict[str, Any], groups: int) -> None:
    optimizer = make_optimizer(OptimizerConfig(**settings), tiny_model(tiny_config()), on_cpu=False)
    assert len(optimizer.param_groups) == groups


def test_nag_decays_matrices_only_when_asked() -> None:
    model = tiny_model(tiny_config())
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    config = OptimizerConfig(name="nag", weight_decay=0.1, decay="matrices")
    optimizer = make_optimizer(config, model, on_cpu=False)
    for group in optimizer.param_groups:
        group["lr"] = 0.5
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    for name, param in model.named_parameters():
        factor = 0.95 if layout_of(param).decays else 1.0
        torch.testing.assert_close(param.detach(), before[name] * factor)
