"""How much arithmetic a trained token costs. A multiplication with its addition counts as 2.

Only matrix products count, as is usual: sums, norms, activations and lookups are a percent of them or less.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_style.config.model import ModelConfig
from megatron_style.model.shape import bands
from megatron_style.planning.vocabulary import zipf_shares

_PASSES = 3  # backward makes two products (for the input and for the weight) of each that forward makes


def training_flops_per_token(
    model: ModelConfig,
    vocab_size: int,
    *,
    segment_length: int,
    cache_length: int,
    band_shares: Sequence[float] | None = None,
    causal_once: bool = True,
) -> float:
    """Forward and backward of one trained token whose cache is full, without recompute.

    `band_shares` is the share of tokens in each band of the vocabulary; default: Zipf's law. `causal_once` counts only
    what a token may attend to: the model's own work, whatever the kernel. Without it, attention is segment x (cache +
    segment), what a kernel that only masks computes."""
    block = _block_products(model, segment_length, cache_length, causal_once)
    shares = tuple(band_shares) if band_shares is not None else zipf_shares(model, vocab_size)
    products = model.layers * block + _vocabulary_products(model, vocab_size, shares)
    return 2.0 * _PASSES * products


def _block_products(model: ModelConfig, segment_length: int, cache_length: int, causal_once: bool) -> float:
    D = model.hidden_size
    keys = segment_length + cache_length
    attended = cache_length + (segment_length + 1) / 2 if causal_once else keys
    # Keys and values of cached tokens are projected anew, with the weights as they are now; no gradient flows back
    # into the cache, which saves one product.
    projections = D * D * (4 + 2 * cache_length / segment_length * (_PASSES - 1) / _PASSES)
    return projections + 2 * attended * D + 2 * D * model.ffn_size


def _vocabulary_products(model: ModelConfig, vocab_size: int, shares: Sequence[float]) -> float:
    """Input projections of the bands, and the scores of a token: of the head always, of a tail for its own tokens."""
    D, (head, *tails) = model.hidden_size, bands(model, vocab_size)
    products = float(D * (head.tokens + len(tails)))
    if model.vocabulary.kind == "adaptive":
        products += shares[0] * D * head.width
    for band, share in zip(tails, shares[1:], strict=True):
        products += share * band.width * (D + D + band.tokens)  # projected inwards, outwards, scored
    return products
