"""Attention in parts is attention under one mask, forwards and backwards."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from megatron_style.model.kernels.attend import attend, causal_mask


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.05)]
)
@pytest.mark.parametrize(("segment", "cache"), [(7, 5), (16, 16), (1, 9), (64, 32), (300, 70), (520, 8), (6, 0)])
def test_parts_are_one(dtype: torch.dtype, tolerance: float, segment: int, cache: int) -> None:
    generator = torch.Generator().manual_seed(3)
    q, cached_k, cached_v, k, v, weight = (
        torch.randn(2, 3, n, 8, generator=generator).to(dtype).requires_grad_()
        for n in (segment, cache, cache, segment, segment, segment)
    )
    found = attend(q, (cached_k, cached_v), (k, v), dropout=0.0)
    mask = causal_mask(segment, cache + segment, q.device)
    keys, values = torch.cat([cached_k, k], 2), torch.cat([cached_v, v], 2)
    expected = F.scaled_dot_product_attention(q.double(), keys.double(), values.double(), attn_mask=mask)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=tolerance)
    inputs = [q, k, v] if cache == 0 else [q, cached_k, cached_v, k, v]
    mine = torch.autograd.grad((found * weight).sum(), inputs)
    theirs = torch.autograd.grad((expected * weight.double()).sum(), inputs)
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one.double(), other.double(), rtol=0, atol=tolerance)
