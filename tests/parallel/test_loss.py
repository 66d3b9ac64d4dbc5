"""The loss of half-precision logits is computed in float32, and keeps no matrix in float32."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_style.parallel.loss import sharded_total_and_pick
from megatron_style.parallel.topology import Axis
from megatron_style.rehearsal.live_bytes import LiveBytes

ROWS, COLUMNS = 1_200, 1_000  # several parts


def logits_of(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(0)
    logits = torch.randn(ROWS, COLUMNS, generator=drawn).mul_(4).to(dtype)
    return logits, torch.randint(0, COLUMNS, (ROWS,), generator=drawn)


def loss_and_gradient(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    leaf = logits.clone().requires_grad_()
    total, picked = sharded_total_and_pick(leaf * 1, targets, range(COLUMNS), Axis())
    weights = torch.linspace(0, 1, ROWS)
    ((total - picked) * weights).sum().backward()
    assert leaf.grad is not None
    return total - picked, leaf.grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_logits_have_the_loss_of_the_same_numbers_in_float32(dtype: torch.dtype) -> None:
    logits, targets = logits_of(dtype)
    nll, gradient = loss_and_gradient(logits, targets)
    full_nll, full_gradient = loss_and_gradient(logits.float(), targets)
    assert nll.dtype == torch.float32
    torch.testing.assert_close(nll, full_nll, rtol=1e-6, atol=1e-6)
    # Sums of parts may be rounded in another way, and then their quotients to the other neighbour in half precision.
    torch.testing.assert_close(gradient, full_gradient.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-7)
    assert (gradient == full_gradient.to(dtype)).double().mean() > 0.999


def test_the_gradient_takes_the_memory_of_the_logits() -> None:
    logits, targets = logits_of(torch.bfloat16)
    leaf = logits.requires_grad_()
    with LiveBytes() as live:
        scores = leaf * 1
        before = live.mark()
        total, picked = sharded_total_and_pick(scores, targets, range(COLUMNS), Axis())
        del scores
        after_forward = live.now
        (total - picked).sum().backward()
    one = ROWS * COLUMNS * 2
    assert after_forward - before < 0.1 * one
    assert live.peak - before < 1.6 * one  # the gradient of `leaf`, and one part in float32
