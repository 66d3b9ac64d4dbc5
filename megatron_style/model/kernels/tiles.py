"""Attention to a cache and the segment after it on CPUs, with dropout or in bfloat16, for which torch's CPU kernel is
missing or slow. Scores are computed in tiles: of a size that a CPU caches, and that is worth the calls for each.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_style.parallel.dropout import MaskSource

_softmax_backward = torch.ops.aten._softmax_backward_data.out


class Tiled(torch.autograd.Function):
    """Attention in tiles of some heads and queries with all keys that they see. Neither weights nor masks are kept: the
    backward pass computes the weights and draws the masks again, tile by tile."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, cached_k: Tensor, cached_v: Tensor, k: Tensor, v: Tensor, rate: float, key: int
    ) -> Tensor:
        tiles = Tiles(q, cached_k.shape[2], rate, key)
        out = torch.empty_like(q)
        for heads in tiles.groups():
            queries = _by_head(q[heads])
            keys = _by_head(torch.cat((cached_k[heads], k[heads]), 2)).to(tiles.dtype)
            values = _by_head(torch.cat((cached_v[heads], v[heads]), 2))
            for rows, seen in tiles.stretches():
                weights = tiles.narrowed(tiles.weights(queries[:, rows], keys[:, :seen]))
                if rate:
                    weights.mul_(tiles.mask(weights))
                mixed = weights @ values[:, :seen]
                out[heads][:, :, rows] = (mixed * tiles.kept_scale).view(out[heads][:, :, rows].shape)
        ctx.save_for_backward(q, cached_k, cached_v, k, v)
        ctx.drawn = (rate, key)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, cached_k, cached_v, k, v = ctx.saved_tensors
        tiles = Tiles(q, cached_k.shape[2], *ctx.drawn)
        grad_q, *grads = map(torch.empty_like, (q, cached_k, k, cached_v, v))
        parts = [cached_k.shape[2], k.shape[2]]
        for heads in tiles.groups():
            keys = _by_head(torch.cat((cached_k[heads], k[heads]), 2))
            values = _by_head(torch.cat((cached_v[heads], v[heads]), 2))
            scaled = _by_head(grad[heads]) * tiles.kept_scale
            found = _tile_gradients(tiles, _by_head(q[heads]), keys, values, scaled)
            grad_q[heads] = found[0].view(grad_q[heads].shape)
            both = (*found[1].split(parts, 1), *found[2].split(parts, 1))
            for into, part in zip(grads, both, strict=True):
                into[heads] = part.view(into[heads].shape)
        grad_cached_k, grad_k, grad_cached_v, grad_v = grads
        return grad_q, grad_cached_k, grad_cached_v, grad_k, grad_v, None, None


class Tiles:
    """The tiles of one call, and the memory that they share. Scores and weights are in float32 at least; products with
    weights and with gradients have the precision of the inputs."""

    ELEMENTS = 2**19  # of a tile, for as many heads as fit: 2 MB in float32
    QUERIES = 128

    def __init__(self, q: Tensor, cached: int, rate: float, key: int) -> None:
        self._rows, self._all_heads, self._length, size = q.shape
        self._cached = cached
        self.scale = size**-0.5
        self.kept_scale = 1 / (1 - rate)
        self.dtype = torch.promote_types(q.dtype, torch.float32)
        self.source = MaskSource(rate, key, q.device) if rate else None
        queries = min(self.QUERIES, self._length)
        fitting = max(1, self.ELEMENTS // (queries * (cached + self._length)))
        self._heads = min(fitting, self._all_heads)
        self._rows_at_once = max(1, min(self._rows, fitting // self._all_heads))
        elements = self._rows_at_once * self._heads * queries * (cached + self._length)
        self._weights, self._scratch = torch.empty(2, elements, dtype=self.dtype, device=q.device)
        same = q.dtype == self.dtype
        self._narrow = self._scratch if same else torch.empty(elements, dtype=q.dtype, device=q.device)
        self._hidden = torch.full((queries, queries), -torch.inf, dtype=self.dtype, device=q.device).triu(1)

    def groups(self) -> Iterator[tuple[slice, slice]]:
        """Yield rows and heads that are computed at once."""
        for row in range(0, self._rows, self._rows_at_once):
            for head in range(0, self._all_heads, self._heads):
                yield slice(row, row + self._rows_at_once), slice(head, head + self._heads)

    def stretches(self) -> Iterator[tuple[slice, int]]:
        """Yield queries, and the number of keys that the last of them sees."""
        for first in range(0, self._length, self.QUERIES):
            last = min(first + self.QUERIES, self._length)
            yield slice(first, last), self._cached + last

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        """Return the weights before dropout, in memory that the next call overwrites."""
        shape = (*q.shape[:2], k.shape[1])
        scores = _view(self._weights, shape)
        torch.baddbmm(scores, q.to(self.dtype), k.transpose(1, 2), beta=0, alpha=self.scale, out=scores)
        scores[:, :, -shape[1] :].add_(self._hidden[: shape[1], : shape[1]])
        return torch.softmax(scores, -1, out=scores)

    def mask(self, weights: Tensor) -> Tensor:
        """Return a mask in the inputs' precision: zeros and ones are exact in any, and short ones are read faster."""
        assert self.source is not None
        return self.source.draw(weights.shape, self._narrow.dtype)

    def scratch(self, like: Tensor) -> Tensor:
        return _view(self._scratch, like.shape)

    def narrow(self, like: Tensor) -> Tensor:
        """Return memory for numbers of the inputs' precision; in that of the weights, it is the scratch memory."""
        return _view(self._narrow, like.shape)

    def narrowed(self, x: Tensor) -> Tensor:
        return x if x.dtype == self._narrow.dtype else self.narrow(x).copy_(x)


def _tile_gradients(tiles: Tiles, q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    """Return the gradients of the queries, keys and values of some heads."""
    grad_q = torch.empty_like(q, memory_format=torch.contiguous_format)
    grad_k, grad_v = torch.zeros(2, *k.shape, dtype=tiles.dtype, device=k.device)
    wide_k = k.to(tiles.dtype)
    for rows, seen in tiles.stretches():
        weights = tiles.weights(q[:, rows], wide_k[:, :seen])
        scratch = tiles.scratch(weights)
        mask = tiles.mask(weights) if tiles.source else None
        dropped = tiles.narrowed(weights)
        if mask is not None:
            dropped = torch.mul(dropped, mask, out=tiles.narrow(weights))
        _add_product(grad_v[:, :seen], dropped.transpose(1, 2), grad[:, rows])
        of_weights = torch.bmm(grad[:, rows], v[:, :seen].transpose(1, 2), out=tiles.narrow(weights))
        if mask is not None:
            of_weights.mul_(mask)
        if of_weights.dtype != scratch.dtype:
            scratch.copy_(of_weights)
        _softmax_backward(scratch, weights, -1, weights.dtype, grad_input=scratch)
        of_scores = tiles.narrowed(scratch)
        torch.mul(of_scores @ k[:, :seen], tiles.scale, out=grad_q[:, rows])
        _add_product(grad_k[:, :seen], of_scores.transpose(1, 2), q[:, rows])
    return grad_q, grad_k.mul_(tiles.scale), grad_v


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    if left.dtype == total.dtype:
        total.baddbmm_(left, right)
    else:
        total.add_(left @ right)


def _by_head(x_BHTE: Tensor) -> Tensor:
    return x_BHTE.reshape(-1, *x_BHTE.shape[2:])


def _view(memory: Tensor, shape: Sequence[int]) -> Tensor:
    return memory[: math.prod(shape)].view(shape)
