"""Attention as layers call it, with the kernel that each device has for it.

Shape letters: B rows, H local heads, T segment tokens, C cached tokens, S both, E head size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_style.model.kernels.parts import Parts
from megatron_style.model.kernels.tiles import Tiled
from megatron_style.parallel.randomness import drawn_key


def attend(q_BHTE: Tensor, cached: tuple[Tensor, Tensor], inside: tuple[Tensor, Tensor], *, dropout: float) -> Tensor:
    """Attend to keys and values of the cache and of the segment (`inside`). On GPUs, SDPA has a fused kernel for this
    mask; the CPU kernel supports neither the mask nor dropout, and is slow in 16 bits."""
    T = q_BHTE.shape[2]
    C = cached[0].shape[2]
    on_cpu = q_BHTE.device.type == "cpu"
    if on_cpu and (dropout or (C and q_BHTE.dtype.itemsize < 4)):
        key = drawn_key() if dropout else 0
        return Tiled.apply(q_BHTE, *cached, *inside, dropout, key)  # type: ignore[no-untyped-call, no-any-return]
    if C == 0:
        return F.scaled_dot_product_attention(q_BHTE, *inside, is_causal=True, dropout_p=dropout)
    if on_cpu:
        return Parts.apply(q_BHTE, *cached, *inside)  # type: ignore[no-untyped-call, no-any-return]
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
