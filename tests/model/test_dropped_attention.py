"""Attention in tiles, on CPUs: with dropout, whose masks the backward pass draws again, and in bfloat16."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_style.model.kernels.attend import attend
from megatron_style.model.kernels.tiles import Tiles

RATE = 0.3


def inputs(T: int, C: int, *, rows: int = 3, heads: int = 3, size: int = 2) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(T + C)
    shapes = [(rows, heads, length, size) for length in (T, C, C, T, T)]
    return tuple(torch.randn(shape, dtype=torch.float64, generator=generator, requires_grad=True) for shape in shapes)


def dropped(q: Tensor, cached_k: Tensor, cached_v: Tensor, k: Tensor, v: Tensor) -> Tensor:
    torch.manual_seed(5)
    return attend(q, (cached_k, cached_v), (k, v), dropout=RATE)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tiles, "QUERIES", 3)


@pytest.fixture(autouse=True, params=[2, 7])
def heads_of_a_tile(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of three heads of a row, so that the last tile is smaller, or all heads of two of three rows."""
    monkeypatch.setattr(Tiles, "ELEMENTS", request.param * 3 * 9)


@pytest.mark.parametrize("C", [0, 4])
def test_gradients_are_those_of_the_function(C: int) -> None:
    assert torch.autograd.gradcheck(dropped, inputs(T=5, C=C), fast_mode=True)


@pytest.mark.parametrize("C", [0, 4])
def test_a_weight_is_that_of_the_softmax_or_zero(C: int) -> None:
    T = 5
    q, cached_k, _, k, _ = inputs(T, C, size=C + T)
    values = torch.eye(C + T, dtype=torch.float64).expand(3, 3, -1, -1)
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


def test_without_dropout_bfloat16_is_that_of_full_precision_within_rounding() -> None:
    half = tuple(x.detach().bfloat16().requires_grad_() for x in inputs(T=5, C=4))
    again = tuple(x.detach().double().requires_grad_() for x in half)
    out, expected = (attend(q, (ck, cv), (k, v), dropout=0.0) for q, ck, cv, k, v in (half, again))
    torch.testing.assert_close(out.double(), expected, atol=0.02, rtol=0.02)
    grads = torch.autograd.grad(out.sum(), half)
    for grad, wanted in zip(grads, torch.autograd.grad(expected.sum(), again), strict=True):
        torch.testing.assert_close(grad.double(), wanted, atol=0.05, rtol=0.05)
