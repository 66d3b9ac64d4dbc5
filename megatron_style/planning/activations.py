"""What a forward pass leaves in memory for its backward pass, and what is most in memory at once.

Each line below is a tensor that autograd keeps. The model's own tensors are counted, whatever the allocator adds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_style.config.model import ModelConfig
from megatron_style.planning.setup import Setup
from megatron_style.schedule.stages import Stage

_FLOAT, _LONG = 4, 8  # bytes


@dataclass(frozen=True)
class _Work:
    """One micro-batch on one rank."""

    setup: Setup
    stage: Stage

    @property
    def model(self) -> ModelConfig:
        return self.setup.model

    @property
    def element_bytes(self) -> int:
        return self.setup.sharding.element_bytes

    @property
    def tokens(self) -> int:
        return self.stage.micro_rows * self.stage.segment_length

    @property
    def keys(self) -> int:
        """Tokens attended to: the cache's and the segment's."""
        return self.stage.micro_rows * (self.stage.segment_length + self.stage.cache_length)


@dataclass(frozen=True)
class ActivationBytes:
    """Of one micro-batch, in bytes. The caches are not among them: they outlive the step."""

    blocks: float  # kept by the blocks; with recompute their inputs only
    vocabulary: float  # kept by embedding and loss, logits among them
    peak: float  # the most at once, with what backward needs beside


def activations(setup: Setup, stage: Stage) -> ActivationBytes:
    work = _Work(setup, stage)
    kept_by_block = _kept_by_block(work)
    stream = work.tokens * work.model.hidden_size * work.element_bytes
    blocks = work.model.layers * (stream if work.setup.recompute else kept_by_block)
    embedding, bands = _kept_by_embedding(work), tuple(_kept_by_bands(work))
    scored = stream * (1 + _drops_in_loss(work))  # what is scored, and its mask
    needed = work.setup.kernels.bytes_needed_per_score + work.element_bytes % _FLOAT  # a copy in half precision
    in_loss = max(sum(bands[: i + 1]) + scores * needed for i, scores in enumerate(_scores(work)))
    in_block = _needed_by_block(work) + (kept_by_block - stream if work.setup.recompute else 0)
    peak = blocks + embedding + max(scored + in_loss, in_block, _seen_until_the_end(work))
    return ActivationBytes(blocks, embedding + scored + sum(bands), peak)


def _kept_by_block(work: _Work) -> float:
    infused = work.model.positions == "infused"
    in_cache = work.stage.cache_length == work.stage.segment_length  # then the next cache holds the normed input
    N, M = work.tokens, work.keys
    vectors = 3 * N  # the block's input, and the feed-forward half's before and behind its norm
    vectors += 0 if in_cache else N  # the block's input behind its norm
    vectors += M if infused else 0  # cache and segment with positions
    vectors += 2 * N if work.model.dropout.hidden else 0  # masks
    norms = 2 * 2 * N * _FLOAT
    return vectors * work.model.hidden_size * work.element_bytes + norms + _kept_by_attention(work) + _kept_by_ffn(work)


def _kept_by_ffn(work: _Work) -> float:
    elements = work.tokens * work.model.ffn_size / work.setup.tensor
    if not work.model.dropout.activation:
        return elements * work.element_bytes
    return elements * (2 * work.element_bytes + _mask_bytes(work, work.element_bytes))  # before, behind, and the mask


def _kept_by_attention(work: _Work) -> float:
    D, queries = work.model.hidden_size / work.setup.tensor, work.tokens * work.model.heads / work.setup.tensor
    inputs, mixed = (work.tokens + 2 * work.keys) * D, work.tokens * D * work.element_bytes
    S = work.stage.segment_length + work.stage.cache_length
    if work.setup.kernels.fused_attention:
        return inputs * work.element_bytes + mixed + queries * _FLOAT  # one sum a query
    # torch's plain kernel computes in full precision.
    dropped = _FLOAT + _mask_bytes(work, _FLOAT) if work.model.dropout.attention else 0
    return inputs * _FLOAT + mixed + queries * S * (_FLOAT + dropped)


def _mask_bytes(work: _Work, masked: int) -> int:
    return 1 if work.setup.kernels.byte_masks else masked


def _needed_by_block(work: _Work) -> float:
    """Gradients alive in the backward pass of a block's feed-forward half, where they are largest."""
    inner = 1 if work.model.dropout.activation else 2  # a dropped copy is gone when the second gradient is made
    wide = inner * work.model.ffn_size / work.setup.tensor
    return work.tokens * (wide + work.model.hidden_size) * work.element_bytes


def _seen_until_the_end(work: _Work) -> float:
    """Recomputed blocks do not keep their normed input, but all of it is there until the next cache is made of it."""
    if not work.setup.recompute or work.stage.cache_length == work.stage.segment_length:
        return 0.0
    return work.model.layers * work.tokens * work.model.hidden_size * work.element_bytes


def _kept_by_embedding(work: _Work) -> float:
    bands = work.setup.bands
    # The vectors this rank has looked up, and the mask.
    elements = work.tokens * work.model.hidden_size * (1 / work.setup.tensor + bool(work.model.dropout.hidden))
    if work.model.vocabulary.kind == "adaptive":
        shares = zip(bands, work.setup.band_shares, strict=True)
        elements += sum(work.tokens * share / work.setup.tensor * band.width for band, share in shares)
    return elements * work.element_bytes + 4 * work.tokens * _LONG  # where each token is, here and in the loss


def _scores(work: _Work) -> Iterator[float]:
    """How many logits each band has: the head one for every token, a tail for its own tokens only."""
    head, *tails = work.setup.bands
    yield work.tokens * (head.tokens / work.setup.tensor + len(tails))
    for band, share in zip(tails, work.setup.band_shares[1:], strict=True):
        yield work.tokens * share * band.tokens / work.setup.tensor


def _kept_by_bands(work: _Work) -> Iterator[float]:
    head, *tails = (scores * work.setup.kernels.bytes_kept_per_score for scores in _scores(work))
    yield head
    bands = work.setup.bands
    for band, share, scores in zip(bands[1:], work.setup.band_shares[1:], tails, strict=True):
        inputs = work.model.hidden_size + band.width * (1 + _drops_in_loss(work))
        yield work.tokens * share * inputs * work.element_bytes + scores


def _drops_in_loss(work: _Work) -> bool:
    return work.model.vocabulary.kind == "adaptive" and work.model.dropout.softmax > 0
