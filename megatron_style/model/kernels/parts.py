"""Attention to a cache and the segment after it, without a mask: in parts, merged by their log-sum-exps.

All of the cache is visible, so that part needs no mask; much of the segment's own part, which is causal, is skipped.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class Parts(torch.autograd.Function):
    """Attention in parts. The weights of one softmax over all parts are exp(score - lse) with the merged lse, so each
    part's backward kernel, given the merged output and lse, computes its own share of the gradients."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, cached_k: Tensor, cached_v: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, lse = _forward(q, cached_k, cached_v)
        for rows, keys, causal in _stretches(q.shape[2]):
            part = _forward(q[:, :, rows], k[:, :, keys], v[:, :, keys], is_causal=causal)
            _merge(out[:, :, rows], lse[:, :, rows], *part)
        ctx.save_for_backward(q, cached_k, cached_v, k, v, out, lse)
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        q, cached_k, cached_v, k, v, out, lse = ctx.saved_tensors
        grad_q, *grad_cached = _backward(grad, q, cached_k, cached_v, out, lse, 0.0, False)
        grad_k = torch.empty_like(k)
        grad_v = torch.empty_like(v)
        for rows, keys, causal in _stretches(q.shape[2]):
            part_q, part_k, part_v = _backward(
                grad[:, :, rows],
                q[:, :, rows],
                k[:, :, keys],
                v[:, :, keys],
                out[:, :, rows],
                lse[:, :, rows],
                0.0,
                causal,
            )
            grad_q[:, :, rows] += part_q
            if causal:  # the first part to see these keys
                grad_k[:, :, keys] = part_k
                grad_v[:, :, keys] = part_v
            else:
                grad_k[:, :, keys] += part_k
                grad_v[:, :, keys] += part_v
        return grad_q, *grad_cached, grad_k, grad_v


def _stretches(T: int) -> Iterator[tuple[slice, slice, bool]]:
    """Yield the segment's own part as (queries, keys, is causal): each stretch with itself, then with all before it.
    The kernel skips only blocks of 512 keys that are hidden entirely; in quarters, 3 parts of 8 are skipped."""
    length = max(128, -(-T // 4))
    for first in range(0, T, length):
        stretch = slice(first, first + length)
        yield stretch, stretch, True
        if first:
            yield stretch, slice(0, first), False


def _merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge into `out` and `lse`, in place, the result of the same queries over other keys."""
    total = torch.logaddexp(lse, part_lse)
    out.mul_((lse - total).exp_()[..., None].to(out.dtype))
    out.add_(part.mul_((part_lse - total).exp_()[..., None].to(out.dtype)))
    lse.copy_(total)
