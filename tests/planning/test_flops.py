"""The planner's arithmetic against torch's own counter, on the real model."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron_style.config.model import ModelConfig
from megatron_style.model.memory import memory_of
from megatron_style.model.shape import bands
from megatron_style.model.shortformer import Shortformer
from megatron_style.parallel.device import products
from megatron_style.parallel.sharding import initialise
from megatron_style.parallel.topology import Axis
from megatron_style.planning.text import zipf_shares
from megatron_style.planning.timing import training_flops_per_token

VOCAB_SIZE, ROWS = 211, 3
COMPRESSED = {"compressed": 6, "rate": 4}
ADAPTIVE = {"kind": "adaptive", "cutoffs": [40, 100], "factor": 2}


def _two_products(q: Any, k: Any, *_: Any, **__: Any) -> int:
    """Scores, and the mixed values. Shapes are rows, heads, tokens, head size."""
    return 2 * 2 * q[0] * q[1] * q[2] * k[2] * q[3]


def _four_products(_: Any, q: Any, k: Any, *__: Any, **___: Any) -> int:
    """The scores, which the kernel makes anew, are not the model's work."""
    return 2 * _two_products(q, k)


CPU_KERNELS = {  # which the counter does not know
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _two_products,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _four_products,
}


def model_config(**changes: Any) -> ModelConfig:
    sizes = {"layers": 2, "hidden_size": 32, "heads": 4, "ffn_size": 96, "vocabulary": ADAPTIVE}
    return ModelConfig.parse(sizes | changes, source="model")


def routing_config(**changes: Any) -> ModelConfig:
    routing = {"heads": 3, "clusters": 5, "window": 8, "local": 4}
    return model_config(cache=False, positions="added", routing=routing | changes)


def counted_flops_per_token(config: ModelConfig, ids: torch.Tensor, cache_length: int) -> float:
    model = Shortformer(config, VOCAB_SIZE)
    initialise(model, 1, Axis())
    memory = memory_of(config).full(config, rows=len(ids), capacity=cache_length, like=torch.empty(0))
    without_padding = patch.object(products, "_BLOCK", 1)
    with without_padding, FlopCounterMode(display=False, custom_mapping=CPU_KERNELS) as counter:
        output = model(ids, ids.flip(0), memory)
        (output.nll.sum() + sum(output.auxiliary.values())).backward()
    return counter.get_total_flops() / ids.numel()


@pytest.mark.parametrize(
    ("config", "segment_length", "cache_length"),
    [
        (model_config(), 16, 16),
        (model_config(), 16, 8),
        (model_config(cache=False, positions="added"), 48, 0),
        (model_config(vocabulary={"kind": "tied"}), 8, 8),
        (model_config(vocabulary={"kind": "untied"}, layers=3, heads=2), 8, 8),
        (model_config(layers=1, hidden_size=64, ffn_size=64), 4, 32),
        (model_config(layers=3, sandwich=1), 16, 8),
        (model_config(positions="relative", norm="after"), 16, 8),
        (model_config(positions="relative", vocabulary=ADAPTIVE | {"biases": True, "projections": "both"}), 16, 16),
        (model_config(positions="relative", vocabulary=ADAPTIVE | {"factor": 1, "projections": "none"}), 8, 24),
        (model_config(positions="relative", norm="after", memory=COMPRESSED), 16, 8),
        (model_config(positions="relative", memory=COMPRESSED | {"function": "max"}), 16, 16),
        (model_config(memory=COMPRESSED), 8, 24),
        (routing_config(), 16, 0),
        (routing_config(window=5, local=7), 16, 0),
        (routing_config(window=30, local=16), 16, 0),
        (routing_config(first_layer=1), 48, 0),
    ],
)
def test_equal_to_torchs_counter(config: ModelConfig, segment_length: int, cache_length: int) -> None:
    ids = torch.randint(VOCAB_SIZE, (ROWS, segment_length), generator=torch.Generator().manual_seed(5))
    shares = [((ids >= band.first) & (ids < band.last)).float().mean().item() for band in bands(config, VOCAB_SIZE)]
    planned = training_flops_per_token(
        config,
        VOCAB_SIZE,
        segment_length=segment_length,
        cache_length=cache_length,
        rows=ROWS,
        band_shares=shares,
        causal_once=False,
    )
    assert planned == pytest.approx(counted_flops_per_token(config, ids, cache_length), rel=1e-6)


def test_only_what_may_be_attended_to_counts_once() -> None:
    config, lengths = model_config(), {"segment_length": 16, "cache_length": 8}
    dense = training_flops_per_token(config, VOCAB_SIZE, **lengths, causal_once=False)
    once = training_flops_per_token(config, VOCAB_SIZE, **lengths)
    masked = sum(16 - 1 - place for place in range(16)) / 16  # tokens ahead, which a token may not attend to
    assert dense - once == pytest.approx(3 * 2 * 2 * config.layers * config.hidden_size * masked)


def test_a_routing_head_counts_the_members_that_a_token_sees() -> None:
    """In one cluster these are the last `window` tokens; local heads see their block and the one before."""
    config = routing_config(clusters=1)
    E = config.hidden_size // config.heads
    lengths = {"segment_length": 16, "cache_length": 0}
    dense = training_flops_per_token(config, VOCAB_SIZE, **lengths, causal_once=False)
    once = training_flops_per_token(config, VOCAB_SIZE, **lengths)
    routed = sum(2 * 8 - min(8, place + 1) for place in range(16)) / 16
    local = sum(2 * 4 - (place % 4 + 1 + 4 * (place >= 4)) for place in range(16)) / 16
    assert dense - once == pytest.approx(3 * 2 * 2 * config.layers * E * (3 * routed + 1 * local))


def test_zipfs_law_is_what_is_taken_for_a_corpus_that_is_not_there() -> None:
    weights = [1 / rank for rank in range(1, 201)]
    expected = [sum(weights[band.first : band.last]) / sum(weights) for band in bands(model_config(), 200)]
    assert zipf_shares(model_config(), 200) == pytest.approx(expected)
    given = {"segment_length": 16, "cache_length": 16}
    assert training_flops_per_token(model_config(), 200, **given) == pytest.approx(
        training_flops_per_token(model_config(), 200, **given, band_shares=expected)
    )


def test_rare_words_are_rarer_than_one_over_their_rank() -> None:
    wide = {"kind": "adaptive", "cutoffs": [20_000, 60_000]}
    shares = zipf_shares(model_config(vocabulary=wide), 267_744)
    assert sum(shares) == pytest.approx(1)
    assert shares[2] < shares[1] < 0.05  # by 1/rank alone, a fifth of all words would be in the tails
