"""Attention with dropout on CPUs, which draws its masks tile by tile and draws them again in the backward pass."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_style.model import kernels
from megatron_style.model.kernels import attend
from megatron_style.parallel.randomness import MaskSource

RATE = 0.3


def inputs(T: int, C: int, *, rows: int = 2, heads: int = 3, size: int = 2) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(T + C)
    shapes = [(rows, heads, length, size) for length in (T, C, C, T, T)]
    return tuple(torch.randn(shape, dtype=torch.float64, generator=generator, requires_grad=True) for shape in shapes)


def dropped(q: Tensor, cached_k: Tensor, cached_v: Tensor, k: Tensor, v: Tensor) -> Tensor:
    torch.manual_seed(5)
    return attend(q, (cached_k, cached_v), (k, v), dropout=RATE)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels._Tiles, "HEADS", 4)  # of 6: the last tile is smaller
    monkeypatch.setattr(kernels._Tiles, "QUERIES", 3)


@pytest.mark.parametrize("C", [0, 4])
def test_gradients_are_those_of_the_function(C: int) -> None:
    assert torch.autograd.gradcheck(dropped, inputs(T=5, C=C))


@pytest.mark.parametrize("C", [0, 4])
def test_a_weight_is_that_of_the_softmax_or_zero(C: int) -> None:
    T = 5
    q, cached_k, _, k, _ = inputs(T, C, size=C + T)
    values = torch.eye(C + T, dtype=torch.float64).expand(2, 3, -1, -1)
    cached_v, v = values.split([C, T], 2)
    weights = dropped(q, cached_k, cached_v, k, v)
    scores = q @ torch.cat([cached_k, k], 2).transpose(2, 3) * q.shape[3] ** -0.5
    hidden = torch.ones(T, C + T, dtype=torch.bool).triu(C + 1)
    expected = scores.masked_fill(hidden, -torch.inf).softmax(-1) / (1 - RATE)
    is_kept = weights != 0
    torch.testing.assert_close(weights[is_kept], expected[is_kept])
    share = is_kept[..., ~hidden].double().mean().item()
    assert 0.5 < share < 0.9


def test_in_bfloat16_it_is_the_same_within_rounding() -> None:
    exact = inputs(T=5, C=4)
    half = tuple(x.detach().bfloat16().requires_grad_() for x in exact)
    again = tuple(x.detach().double().requires_grad_() for x in half)
    out = dropped(*half)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), dropped(*again), atol=0.02, rtol=0.02)
    grads = torch.autograd.grad(out.sum(), half)
    expected = torch.autograd.grad(dropped(*again).sum(), again)
    for grad, wanted in zip(grads, expected, strict=True):
        torch.testing.assert_close(grad.double(), wanted, atol=0.05, rtol=0.05)


@pytest.mark.parametrize("rate", [0.001, 0.1, 0.5, 0.9])
def test_elements_are_dropped_at_the_exact_rate(rate: float) -> None:
    shape = torch.Size((64, 1000))
    masks = [MaskSource(rate, key, torch.device("cpu")).draw(shape) for key in range(200)]
    count = 200 * shape.numel()
    kept = sum(int(mask.sum()) for mask in masks)
    # Most of the spread comes from the threshold of each mask, which is rounded up or down.
    spread = (count * rate * (1 - rate)) ** 0.5 + 200**0.5 * shape.numel() / 256 / 2
    assert abs(kept - count * (1 - rate)) < 4 * spread
    assert {int(value) for value in masks[0].unique()} <= {0, 1}


def test_a_key_gives_the_same_masks_again_and_each_mask_differs() -> None:
    first, second = (MaskSource(0.5, 9, torch.device("cpu")) for _ in range(2))
    shape = torch.Size((7, 5))
    drawn = [first.draw(shape) for _ in range(3)]
    assert all(torch.equal(mask, second.draw(shape)) for mask in drawn)
    assert not torch.equal(drawn[0], drawn[1])
