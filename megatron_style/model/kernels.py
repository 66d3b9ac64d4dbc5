"""Attention to a cache and the segment after it, without a mask: in parts, merged by their log-sum-exps.

All of the cache is visible, so that part needs no mask; much of the segment's own part, which is causal, is skipped.
Shape letters: B rows, H local heads, T segment tokens, C cached tokens, E head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_style.parallel.randomness import MaskSource, drawn_key

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def attend(q_BHTE: Tensor, cached: tuple[Tensor, Tensor], inside: tuple[Tensor, Tensor], *, dropout: float) -> Tensor:
    """Attend to keys and values of the cache and of the segment (`inside`). On GPUs, SDPA has a fused kernel for this
    mask; the CPU kernel supports neither the mask nor dropout."""
    T = q_BHTE.shape[2]
    C = cached[0].shape[2]
    on_cpu = q_BHTE.device.type == "cpu"
    if on_cpu and dropout:
        return _Dropping.apply(q_BHTE, *cached, *inside, dropout, drawn_key())  # type: ignore[no-untyped-call, no-any-return]
    if C == 0:
        return F.scaled_dot_product_attention(q_BHTE, *inside, is_causal=True, dropout_p=dropout)
    if on_cpu:
        return _Parts.apply(q_BHTE, *cached, *inside)  # type: ignore[no-untyped-call, no-any-return]
    keys, values = _joined(cached, inside)
    return F.scaled_dot_product_attention(q_BHTE, keys, values, attn_mask=_fused_mask(T, C + T), dropout_p=dropout)


def attend_masked(
    q_BHTE: Tensor, cached: tuple[Tensor, Tensor], inside: tuple[Tensor, Tensor], hidden_B1TS: Tensor, *, dropout: float
) -> Tensor:
    """Attend to the keys of cache and segment that are not hidden."""
    keys, values = _joined(cached, inside)
    return F.scaled_dot_product_attention(q_BHTE, keys, values, attn_mask=~hidden_B1TS, dropout_p=dropout)


def _joined(cached: tuple[Tensor, Tensor], inside: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    keys, values = (torch.cat(part, dim=2) for part in zip(cached, inside, strict=True))
    return keys, values


def attend_with_distances(
    content_BHTE: Tensor,
    keys_BHSE: Tensor,
    values_BHSE: Tensor,
    distance_scores_HBTS: Tensor,
    hidden_TS: Tensor,
    *,
    dropout: float,
) -> Tensor:
    """Attend by the sum of two scores: of content and key, and of a query and the distance to the key. The second is a
    bias of T x S numbers for each head, which no fused CPU kernel differentiates."""
    bias_BHTS = distance_scores_HBTS.transpose(0, 1).masked_fill(hidden_TS, -torch.inf)
    return F.scaled_dot_product_attention(content_BHTE, keys_BHSE, values_BHSE, attn_mask=bias_BHTS, dropout_p=dropout)


def score_distances(distant_BHTE: Tensor, distances_HSE: Tensor) -> Tensor:
    """Return the scores of queries and their distances to the keys [H, B, T, S], given the distances S-1 to 0."""
    B, H, T, E = distant_BHTE.shape
    # One product for all rows; with a dim for rows, torch would copy the distances for each of them.
    distant_HNE = (distant_BHTE * E**-0.5).transpose(0, 1).flatten(1, 2)
    return _by_key((distant_HNE @ distances_HSE.transpose(1, 2)).view(H, B, T, -1))


def attend_in_blocks(
    q_BHTE: Tensor,
    k_BHTE: Tensor,
    v_BHTE: Tensor,
    *,
    block: int,
    window: int | None = None,
    member: Tensor | None = None,
    dropout: float,
) -> Tensor:
    """Attend from each token to its block of tokens up to itself and to the block before: to all of them, or to
    `window` of them, itself included, and to those that have its `member` number [B, H, T]. At most T x 2 blocks of
    scores are computed."""
    T = q_BHTE.shape[2]
    if block >= T and member is None:
        return F.scaled_dot_product_attention(q_BHTE, k_BHTE, v_BHTE, is_causal=True, dropout_p=dropout)
    block = min(block, T)
    if member is None:
        member = q_BHTE.new_zeros(1, 1, T, dtype=torch.long)
    queries = _blocks(q_BHTE, block)
    keys = _with_block_before(_blocks(k_BHTE, block))
    values = _with_block_before(_blocks(v_BHTE, block))
    own = _blocks(member[..., None] + 1, block)  # padding has number 0
    seen = _with_block_before(own)
    visible = (own == seen.transpose(2, 3)) & causal_mask(block, seen.shape[2], q_BHTE.device, window=window)
    mixed = F.scaled_dot_product_attention(queries, keys, values, attn_mask=visible, dropout_p=dropout)
    return mixed.flatten(1, 2)[:, :T].reshape(q_BHTE.shape)


def _blocks(x_BHTE: Tensor, block: int) -> Tensor:
    """Return the tokens in blocks [B x H, blocks, tokens of a block, E], the last one padded with zeros."""
    B, H, T, E = x_BHTE.shape
    padded = F.pad(x_BHTE, (0, 0, 0, -T % block)) if T % block else x_BHTE
    return padded.reshape(B * H, -(-T // block), block, E)


def _with_block_before(x: Tensor) -> Tensor:
    """Return each block after the one before it, which is zeros for the first of several."""
    return x if x.shape[1] == 1 else torch.cat([F.pad(x, (0, 0, 0, 0, 1, -1)), x], dim=2)


def _by_key(scores: Tensor) -> Tensor:
    """Return scores by key instead of by distance S-1 to 0. The last query finds them in order; each earlier one finds
    its own one column further to the right, and the last columns hold nothing that it may see. With one column more,
    rows of S + 1 numbers read as rows of S move by one column each."""
    *leading, T, S = scores.shape
    return F.pad(scores, (1, 0)).view(*leading, S + 1, T)[..., 1:, :].reshape(*leading, T, S)


def causal_mask(T: int, S: int, device: torch.device, window: int | None = None) -> Tensor:
    """Return the mask [T, S] of the last T of S tokens: each sees itself and the tokens before it, all of them or
    `window` tokens in all."""
    visible = torch.ones(T, S, dtype=torch.bool, device=device).tril(S - T)
    return visible if window is None else visible.triu(S - T - window + 1)


def _fused_mask(T: int, S: int) -> Tensor:
    """Return the same mask in the form that fused kernels know."""
    from torch.nn.attention.bias import causal_lower_right  # imports torch's compiler, which takes a second

    return causal_lower_right(T, S)


class _Parts(torch.autograd.Function):
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


class _Dropping(torch.autograd.Function):
    """Attention whose weights are dropped, in tiles of some heads and queries with all keys that they see. Neither
    weights nor masks are kept: the backward pass computes the weights and draws the masks again, tile by tile."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, cached_k: Tensor, cached_v: Tensor, k: Tensor, v: Tensor, rate: float, key: int
    ) -> Tensor:
        tiles = _Tiles(q, (cached_k, cached_v), (k, v), MaskSource(rate, key, q.device))
        out = torch.empty_like(tiles.queries)
        for tile in tiles.all():
            weights = tiles.weights(tile)
            weights.mul_(tiles.source.draw(weights.shape))
            out[tile.heads, tile.rows] = weights @ tiles.values[tile.heads, tile.keys]
        mixed = out.mul_(1 / (1 - rate)).view(q.shape).to(q.dtype)
        ctx.save_for_backward(q, cached_k, cached_v, k, v, mixed)
        ctx.rate = rate
        ctx.key = key
        return mixed

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, cached_k, cached_v, k, v, mixed = ctx.saved_tensors
        tiles = _Tiles(q, (cached_k, cached_v), (k, v), MaskSource(ctx.rate, ctx.key, q.device))
        grad = grad.reshape(tiles.queries.shape).to(tiles.queries.dtype)
        own = (grad * mixed.flatten(0, 1)).sum(-1, keepdim=True)
        grad = grad * (1 / (1 - ctx.rate))
        grad_q = torch.empty_like(tiles.queries)
        grad_k = torch.zeros_like(tiles.keys)
        grad_v = torch.zeros_like(tiles.values)
        for tile in tiles.all():
            heads, rows, keys = tile
            weights = tiles.weights(tile)
            mask = tiles.source.draw(weights.shape)
            scratch = weights * mask
            grad_v[heads, keys].baddbmm_(scratch.transpose(1, 2), grad[heads, rows])
            torch.bmm(grad[heads, rows], tiles.values[heads, keys].transpose(1, 2), out=scratch)
            scratch.mul_(mask).sub_(own[heads, rows]).mul_(weights)  # the gradient of the scores
            grad_q[heads, rows] = scratch @ tiles.keys[heads, keys]
            grad_k[heads, keys].baddbmm_(scratch.transpose(1, 2), tiles.queries[heads, rows])
        grad_q.mul_(tiles.scale)
        C = cached_k.shape[2]
        both = (
            part.view(*q.shape[:2], -1, q.shape[3]).to(q.dtype).split([C, k.shape[2]], 2) for part in (grad_k, grad_v)
        )
        (grad_cached_k, grad_inside_k), (grad_cached_v, grad_inside_v) = both
        return (
            grad_q.view(q.shape).to(q.dtype), grad_cached_k, grad_cached_v, grad_inside_k, grad_inside_v, None, None,
        )  # fmt: skip


class _Tile(NamedTuple):
    heads: slice  # of all rows
    rows: slice  # queries
    keys: slice  # those that the queries see, some of them partly


class _Tiles:
    """Scaled queries, keys and values by head [B x H, tokens, E], in at least float32."""

    HEADS = 4  # with 128 queries, a tile of 1024 keys takes 2 MB
    QUERIES = 128

    def __init__(
        self, q: Tensor, cached: tuple[Tensor, Tensor], inside: tuple[Tensor, Tensor], source: MaskSource
    ) -> None:
        self.source = source
        self.scale = q.shape[3] ** -0.5
        dtype = torch.promote_types(q.dtype, torch.float32)
        self.queries = q.flatten(0, 1).to(dtype) * self.scale
        self.keys, self.values = (part.flatten(0, 1).to(dtype) for part in _joined(cached, inside))
        self._cached = cached[0].shape[2]
        self._hidden = torch.ones(self.QUERIES, self.QUERIES, dtype=torch.bool, device=q.device).triu(1)

    def all(self) -> Iterator[_Tile]:
        rows, T, _ = self.queries.shape
        for head in range(0, rows, self.HEADS):
            for first in range(0, T, self.QUERIES):
                last = min(first + self.QUERIES, T)
                yield _Tile(slice(head, head + self.HEADS), slice(first, last), slice(0, self._cached + last))

    def weights(self, tile: _Tile) -> Tensor:
        """Return the weights before dropout."""
        scores = self.queries[tile.heads, tile.rows] @ self.keys[tile.heads, tile.keys].transpose(1, 2)
        queries = scores.shape[1]
        scores[:, :, -queries:].masked_fill_(self._hidden[:queries, :queries], -torch.inf)
        weights: Tensor = scores.softmax(-1)
        return weights
