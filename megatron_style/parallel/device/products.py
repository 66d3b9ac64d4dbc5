"""Matrix products by the fastest kernel that torch has for a device and a precision.

In float32 on CPUs torch calls MKL, which on an AMD EPYC with AVX-512 reaches less than half the rate of oneDNN. torch
itself uses oneDNN for 16 bits only; here it multiplies what is large.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

LEAST = 2**19  # multiplications: below, the call of oneDNN costs more than it saves
_BLOCK = 32  # rows


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x W^T + b, like torch's function of this name."""
    if not _by_onednn(x, weight):
        return F.linear(x, weight, bias)
    if not torch.is_grad_enabled():
        return _product(x, weight, bias)
    return _Linear.apply(x, weight, bias)  # type: ignore[no-untyped-call, no-any-return]


def gradient_of_input(grad: Tensor, weight: Tensor) -> Tensor:
    """Return the gradient of `linear` for x, given that of its result."""
    return _product(grad, weight.T) if _by_onednn(grad, weight.T) else grad @ weight


def gradient_of_weight(grad: Tensor, x: Tensor) -> Tensor:
    """Return the gradient of `linear` for the weight, given that of its result."""
    grad_ND = grad.flatten(0, -2)
    x_ND = x.flatten(0, -2)
    if not _by_onednn(grad_ND.T, x_ND.T):
        return grad_ND.T @ x_ND
    if grad_ND.shape[1] <= x_ND.shape[1]:  # oneDNN copies a transposed first factor: let it be the smaller one
        return _product(grad_ND.T, x_ND.T)
    return _product(x_ND.T, grad_ND.T).T


def in_blocks(rows: Tensor, like: Tensor) -> Tensor:
    """Return row numbers, for products that oneDNN may compute with zeros after them up to a multiple of a block. The
    number of rows differs from step to step, and oneDNN compiles and keeps a product for every new shape."""
    compiled = like.device.type == "cpu" and like.dtype.itemsize <= 4
    return F.pad(rows, (0, -len(rows) % _BLOCK)) if compiled else rows


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _product(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        return (
            gradient_of_input(grad, weight) if needs_x else None,
            gradient_of_weight(grad, x) if needs_weight else None,
            grad.flatten(0, -2).sum(0) if needs_bias else None,
        )


def _by_onednn(x: Tensor, weight: Tensor) -> bool:
    return (
        x.device.type == "cpu"
        and x.dtype == torch.float32
        and x.numel() * weight.shape[0] >= LEAST
        and torch.backends.mkldnn.is_available()
    )


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return product
