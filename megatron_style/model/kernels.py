"""Attention to a cache and to the segment behind it, without a mask: two parts, merged by their log-sum-exps.

All of the cache is visible, so that part needs no mask; the segment's own part is causal, of which kernels skip half.
Shape letters: B rows, H local heads, T segment tokens, C cached tokens, E head size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def attend(q_BHTE: Tensor, cached: tuple[Tensor, Tensor], inside: tuple[Tensor, Tensor], *, dropout: float) -> Tensor:
    """`cached` and `inside` are keys and values. The kernels of a GPU know this mask by its name; torch's CPU kernel
    does not, and cannot drop anything."""
    T, C, on_cpu = q_BHTE.shape[2], cached[0].shape[2], q_BHTE.device.type == "cpu"
    if C == 0:
        return F.scaled_dot_product_attention(q_BHTE, *inside, is_causal=True, dropout_p=dropout)
    if on_cpu and dropout == 0:
        return _TwoParts.apply(q_BHTE, *cached, *inside)  # type: ignore[no-untyped-call, no-any-return]
    keys, values = (torch.cat(part, dim=2) for part in zip(cached, inside, strict=True))
    mask = causal_mask(T, C + T, q_BHTE.device) if on_cpu else causal_lower_right(T, C + T)
    return F.scaled_dot_product_attention(q_BHTE, keys, values, attn_mask=mask, dropout_p=dropout)


def causal_mask(T: int, S: int, device: torch.device) -> Tensor:
    """All earlier tokens are visible; of the last T each sees itself and those before it."""
    return torch.ones(T, S, dtype=torch.bool, device=device).tril(S - T)


class _TwoParts(torch.autograd.Function):
    """The weights of one softmax over both parts are exp(score - lse) with the lse of both, so each part's backward
    kernel, given the merged output and lse, finds its own share of the gradients."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, cached_k: Tensor, cached_v: Tensor, k: Tensor, v: Tensor) -> Tensor:
        before, before_lse = _forward(q, cached_k, cached_v)
        inside, inside_lse = _forward(q, k, v, is_causal=True)
        lse = torch.logaddexp(before_lse, inside_lse)
        out: Tensor = before.mul_((before_lse - lse).exp_()[..., None].to(q.dtype))
        out.add_(inside.mul_((inside_lse - lse).exp_()[..., None].to(q.dtype)))
        ctx.save_for_backward(q, cached_k, cached_v, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        q, cached_k, cached_v, k, v, out, lse = ctx.saved_tensors
        q_before, *before = _backward(grad, q, cached_k, cached_v, out, lse, 0.0, False)
        q_inside, *inside = _backward(grad, q, k, v, out, lse, 0.0, True)
        return q_before.add_(q_inside), *before, *inside
