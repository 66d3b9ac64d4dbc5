"""What a forward pass leaves in memory for its backward pass, and what is most in memory at once.

Each line below is a tensor that autograd keeps. The model's own tensors are counted, whatever the allocator adds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_style.config.model import ModelConfig
from megatron_style.planning.vocabulary import bands_of

_FLOAT, _LONG = 4, 8  # bytes


@dataclass(frozen=True)
class Kernels:
    """What torch's kernels keep; the defaults are those of GPUs."""

    fused_attention: bool = True  # never holds the matrix of tokens x tokens; CPUs have it only without dropout
    byte_masks: bool = True  # torch's own dropout keeps a byte an element; on CPUs as much as the element has
    bytes_kept_per_score: int = _FLOAT  # logits are in full precision, whatever the weights are in
    bytes_needed_per_score: int = 4 * _FLOAT  # while the gradients of their sum and of the one picked are added up


ON_GPU = Kernels()


@dataclass(frozen=True)
class Workload:
    """One micro-batch on one rank, and how it is computed."""

    model: ModelConfig
    vocab_size: int
    rows: int
    segment_length: int
    cache_length: int
    band_shares: Sequence[float]  # of the tokens
    element_bytes: int  # of weights and activations
    tensor: int = 1
    recompute: bool = False
    kernels: Kernels = ON_GPU

    @property
    def tokens(self) -> int:
        return self.rows * self.segment_length

    @property
    def keys(self) -> int:
        """Tokens attended to: the cache's and the segment's."""
        return self.rows * (self.segment_length + self.cache_length)


@dataclass(frozen=True)
class ActivationBytes:
    """Of one micro-batch, in bytes. The caches are not among them: they outlive the step."""

    blocks: float  # kept by the blocks; with recompute their inputs only
    vocabulary: float  # kept by embedding and loss, logits among them
    peak: float  # the most at once, with what backward needs beside


def activations(work: Workload) -> ActivationBytes:
    kept_by_block = _kept_by_block(work)
    stream = work.tokens * work.model.hidden_size * work.element_bytes
    blocks = work.model.layers * (stream if work.recompute else kept_by_block)
    embedding, bands = _kept_by_embedding(work), tuple(_kept_by_bands(work))
    scored = stream * (1 + _drops_in_loss(work))  # what is scored, and its mask
    in_loss = max(
        sum(bands[: i + 1]) + scores * work.kernels.bytes_needed_per_score for i, scores in enumerate(_scores(work))
    )
    in_block = _needed_by_block(work) + (kept_by_block - stream if work.recompute else 0)
    peak = blocks + embedding + max(scored + in_loss, in_block, _seen_until_the_end(work))
    return ActivationBytes(blocks, embedding + scored + sum(bands), peak)


def _kept_by_block(work: Workload) -> float:
    D, rates, infused = work.model.hidden_size, work.model.dropout, work.model.positions == "infused"
    N, M, cached = work.tokens, work.keys, work.cache_length > 0
    whole = 3 * N  # the input of the block and of each norm's product: x, x behind attention, normed x
    whole += N if not cached or (not infused and work.cache_length != work.segment_length) else 0  # normed x
    whole += M if cached else 0  # cache and segment, joined
    whole += N + M if infused else 0  # with positions: for queries and for keys
    whole += 2 * N if rates.hidden else 0  # masks
    norms = 2 * 2 * N * _FLOAT
    return whole * D * work.element_bytes + norms + _kept_by_attention(work) + _kept_by_ffn(work)


def _kept_by_ffn(work: Workload) -> float:
    elements = work.tokens * work.model.ffn_size / work.tensor
    if not work.model.dropout.activation:
        return elements * work.element_bytes
    return elements * (2 * work.element_bytes + _mask_bytes(work, work.element_bytes))  # before, behind, and the mask


def _kept_by_attention(work: Workload) -> float:
    heads, L, S = work.model.heads / work.tensor, work.segment_length, work.segment_length + work.cache_length
    inputs = (work.tokens + 2 * work.keys) * work.model.hidden_size / work.tensor  # queries, keys, values
    mixed = work.tokens * work.model.hidden_size / work.tensor * work.element_bytes
    if work.kernels.fused_attention:
        mask = L * S * work.element_bytes if work.cache_length else 0
        return inputs * work.element_bytes + mixed + work.rows * heads * L * _FLOAT + mask  # a sum for each query
    # torch's plain kernel computes in full precision.
    dropped = _FLOAT + _mask_bytes(work, _FLOAT) if work.model.dropout.attention else 0
    return inputs * _FLOAT + mixed + work.rows * heads * L * S * (_FLOAT + dropped)


def _mask_bytes(work: Workload, masked: int) -> int:
    return 1 if work.kernels.byte_masks else masked


def _needed_by_block(work: Workload) -> float:
    """Gradients alive in the backward pass of a block's feed-forward half, where they are largest."""
    inner = 1 if work.model.dropout.activation else 2  # a dropped copy is gone when the second gradient is made
    wide = inner * work.model.ffn_size / work.tensor
    return work.tokens * (wide + work.model.hidden_size) * work.element_bytes


def _seen_until_the_end(work: Workload) -> float:
    """Recomputed blocks do not keep their normed input, but all of it is there until the next cache is made of it."""
    if not work.recompute or work.cache_length == work.segment_length:
        return 0.0
    return work.model.layers * work.tokens * work.model.hidden_size * work.element_bytes


def _kept_by_embedding(work: Workload) -> float:
    bands = bands_of(work.model, work.vocab_size)
    # The vectors this rank has looked up, and the mask.
    elements = work.tokens * work.model.hidden_size * (1 / work.tensor + bool(work.model.dropout.hidden))
    if work.model.vocabulary.kind == "adaptive":
        shares = zip(bands, work.band_shares, strict=True)
        elements += sum(work.tokens * share / work.tensor * band.width for band, share in shares)
    return elements * work.element_bytes + 4 * work.tokens * _LONG  # where each token is, here and in the loss


def _scores(work: Workload) -> Iterator[float]:
    """How many logits each band has: the head one for every token, a tail for its own tokens only."""
    head, *tails = bands_of(work.model, work.vocab_size)
    yield work.tokens * (head.tokens / work.tensor + len(tails))
    for band, share in zip(tails, work.band_shares[1:], strict=True):
        yield work.tokens * share * band.tokens / work.tensor


def _kept_by_bands(work: Workload) -> Iterator[float]:
    head, *tails = (scores * work.kernels.bytes_kept_per_score for scores in _scores(work))
    yield head
    bands = bands_of(work.model, work.vocab_size)
    for band, share, scores in zip(bands[1:], work.band_shares[1:], tails, strict=True):
        inputs = work.model.hidden_size + band.width * (1 + _drops_in_loss(work))
        yield work.tokens * share * inputs * work.element_bytes + scores


def _drops_in_loss(work: Workload) -> bool:
    return work.model.vocabulary.kind == "adaptive" and work.model.dropout.softmax > 0
