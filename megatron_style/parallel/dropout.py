"""Dropout. Masks come from a key and are drawn again in the backward pass, so that none is kept.

On CPUs, tensors are processed in chunks that stay in the cache, so that a mask costs no pass over memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from megatron_style.parallel.randomness import Noise, derive_key, drawn_key

_CHUNK = 2**18  # elements


def replicated_dropout(x: Tensor, rate: float, noise: Noise | None) -> Tensor:
    """Apply dropout to a tensor that is replicated over the tensor axis: all ranks drop the same elements."""
    if noise is None or rate == 0:
        return x
    return _Dropped.apply(x, rate, noise.key)  # type: ignore[no-untyped-call, no-any-return]


def add_with_dropout(x: Tensor, update: Tensor, rate: float, noise: Noise | None) -> Tensor:
    """Return `x` plus the replicated `update`, of which all ranks drop the same elements."""
    if noise is None or rate == 0:
        return x + update
    return _Added.apply(x, update, rate, noise.key)  # type: ignore[no-untyped-call, no-any-return]


def sharded_relu(x: Tensor, rate: float, noise: Noise | None) -> Tensor:
    """Apply ReLU and dropout to a tensor that is split over the tensor axis: each rank drops its own elements."""
    if noise is None or rate == 0:
        return F.relu(x)
    return _Rectified.apply(x, rate, drawn_key())  # type: ignore[no-untyped-call, no-any-return]


class MaskSource:
    """Draws masks one after the other; the same key gives the same ones.

    An element is kept if its random byte reaches a threshold of rate x 256, which each mask rounds up or down at random
    so that the probability is exact. Eight elements take one random word. On CPUs the words come from NumPy, whose
    generator is four times as fast as torch's."""

    def __init__(self, rate: float, key: int, device: torch.device) -> None:
        self._rate = rate
        self._key = key
        self._drawn = 0
        self._device = device
        self._generator = np.random.SFC64(key) if device.type == "cpu" else Generator(device).manual_seed(key)

    def draw(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Return a mask: 1 for an element that is kept, 0 for one that is dropped."""
        coin = derive_key(self._key, self._drawn) / 2**63
        self._drawn += 1
        threshold = math.floor(self._rate * 256 + coin)
        if threshold > 255:  # a byte would be compared with 0
            return torch.zeros(shape, dtype=dtype, device=self._device)
        drawn = self._bytes(-(-shape.numel() // 8))
        # The result is as wide as the bytes: torch compares bytes into booleans many times slower.
        kept = torch.ge(drawn, threshold, out=drawn)
        return kept[: shape.numel()].view(shape).to(dtype)

    def _bytes(self, words: int) -> Tensor:
        if isinstance(self._generator, Generator):
            drawn = torch.empty(words, dtype=torch.int64, device=self._device)
            return drawn.random_(-(2**63), None, generator=self._generator).view(torch.uint8)
        return torch.from_numpy(self._generator.random_raw(words).view(np.uint8))


class _Dropped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rate: float, key: int) -> Tensor:
        ctx.drawn = (rate, key)
        return _dropped(x, rate, key)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _dropped(grad, *ctx.drawn), None, None


class _Added(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, update: Tensor, rate: float, key: int) -> Tensor:
        ctx.drawn = (rate, key)
        total = torch.empty_like(x, memory_format=torch.contiguous_format)
        source = MaskSource(rate, key, x.device)
        for into, own, other in _chunks(total, x, update):
            torch.addcmul(own, other, source.draw(own.shape, own.dtype), value=1 / (1 - rate), out=into)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        return grad, _dropped(grad, *ctx.drawn), None, None


class _Rectified(torch.autograd.Function):
    """Keeps its output only: an element is positive if it was so before and was not dropped."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rate: float, key: int) -> Tensor:
        ctx.scale = 1 / (1 - rate)
        result = torch.empty_like(x, memory_format=torch.contiguous_format)
        source = MaskSource(rate, key, x.device)
        for into, part in _chunks(result, x):
            torch.clamp_min(part, 0, out=into).mul_(source.draw(part.shape, part.dtype)).mul_(ctx.scale)
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (result,) = ctx.saved_tensors
        grad_x = torch.empty_like(result)
        for into, part, kept in _chunks(grad_x, grad, result):
            torch.ops.aten.threshold_backward.grad_input(part, kept, 0, grad_input=into)
            into.mul_(ctx.scale)
        return grad_x, None, None


def _dropped(x: Tensor, rate: float, key: int) -> Tensor:
    result = torch.empty_like(x, memory_format=torch.contiguous_format)
    source = MaskSource(rate, key, x.device)
    for into, part in _chunks(result, x):
        torch.mul(part, source.draw(part.shape, part.dtype), out=into).mul_(1 / (1 - rate))
    return result


def _chunks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield the same elements of each tensor, of which the first is contiguous and is written to."""
    flat = [x.reshape(-1) for x in tensors]
    size = _CHUNK if tensors[0].device.type == "cpu" else max(1, len(flat[0]))
    return zip(*(x.split(size) for x in flat), strict=True)
