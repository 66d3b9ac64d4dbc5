"""Masks, and what they are applied to: chunk by chunk, and again in the backward pass."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megatron_style.parallel import dropout
from megatron_style.parallel.dropout import MaskSource, add_with_dropout, replicated_dropout, sharded_relu
from megatron_style.parallel.randomness import Noise

CPU = torch.device("cpu")
RATE = 0.3
NOISE = Noise(11)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dropout, "_CHUNK", 7)


@pytest.mark.parametrize("rate", [0.001, 0.1, 0.5, 0.9, 0.999])
def test_elements_are_dropped_at_the_exact_rate(rate: float) -> None:
    shape = torch.Size((64, 1000))
    masks = [MaskSource(rate, key, CPU).draw(shape, torch.float32) for key in range(200)]
    count = 200 * shape.numel()
    kept = sum(int(mask.sum()) for mask in masks)
    # Most of the spread comes from the threshold of each mask, which is rounded up or down.
    spread = (count * rate * (1 - rate)) ** 0.5 + 200**0.5 * shape.numel() / 256 / 2
    assert abs(kept - count * (1 - rate)) < 4 * spread
    assert {int(value) for value in masks[0].unique()} <= {0, 1}


def test_a_key_gives_the_same_masks_again_and_each_mask_differs() -> None:
    first, second = (MaskSource(0.5, 9, CPU) for _ in range(2))
    shape = torch.Size((7, 5))
    drawn = [first.draw(shape, torch.float32) for _ in range(3)]
    assert all(torch.equal(mask, second.draw(shape, torch.float32)) for mask in drawn)
    assert not torch.equal(drawn[0], drawn[1])


def relu(x: Tensor) -> Tensor:
    torch.manual_seed(3)
    return sharded_relu(x, RATE, NOISE)


def added(x: Tensor) -> Tensor:
    return add_with_dropout(x.flip(0), x, RATE, NOISE)


def alone(x: Tensor) -> Tensor:
    return replicated_dropout(x, RATE, NOISE)


@pytest.mark.parametrize("apply", [relu, added, alone])
def test_gradients_are_those_of_the_function(apply: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1), requires_grad=True)
    assert torch.autograd.gradcheck(apply, x)
    assert torch.autograd.gradcheck(lambda x: apply(x.T), x)  # an input that is not contiguous


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_an_element_is_dropped_or_scaled(dtype: torch.dtype) -> None:
    x = torch.randn(50, 40, generator=torch.Generator().manual_seed(1)).to(dtype)
    scaled = x / (1 - RATE)
    kept = alone(x) != 0
    assert 0.65 < kept.double().mean() < 0.75
    torch.testing.assert_close(alone(x), scaled * kept)
    expected = (1 + x.double() / (1 - RATE) * kept).to(dtype)  # rounded once
    torch.testing.assert_close(add_with_dropout(torch.ones_like(x), x, RATE, NOISE), expected)
    rectified = relu(x)
    assert 0.65 < (rectified[x > 0] != 0).double().mean() < 0.75
    torch.testing.assert_close(rectified, scaled * (rectified != 0))
    assert bool((rectified >= 0).all())
