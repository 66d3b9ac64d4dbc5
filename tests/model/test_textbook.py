"""The model against the paper in plain loops, for every variant a config can name."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_style.config.model import ModelConfig
from megatron_style.inference.scoring.protocol import Protocol
from megatron_style.inference.scoring.score import score
from megatron_style.model.shape import count_parameters
from megatron_style.model.shortformer import Shortformer
from megatron_style.parallel.sharding import initialise
from megatron_style.parallel.topology import Axis
from tests.support import textbook

VOCABULARIES = {
    "adaptive": {"kind": "adaptive", "cutoffs": [5, 9], "factor": 2},
    "tied": {"kind": "tied"},
    "untied": {"kind": "untied"},
}
VOCAB_SIZE = 17


def small_config(vocabulary: str, positions: str, sandwich: int = 0) -> ModelConfig:
    data = {
        "layers": 2 + sandwich,
        "sandwich": sandwich,
        "hidden_size": 8,
        "heads": 2,
        "ffn_size": 12,
        "positions": positions,
        "vocabulary": VOCABULARIES[vocabulary],
    }
    return ModelConfig.parse(data, source="test")


def small_model(config: ModelConfig) -> Shortformer:
    model = Shortformer(config, VOCAB_SIZE)
    initialise(model, seed=3, axis=Axis())
    with torch.no_grad():  # norms start as the identity, which would hide a mix-up of their parameters
        for name, param in model.named_parameters():
            if "norm" in name:
                param.add_(torch.randn(param.shape, generator=torch.Generator().manual_seed(len(name))) * 0.3)
    return model.double()


@pytest.mark.parametrize("cache_length", [0, 2, 4, 7])
@pytest.mark.parametrize("positions", ["added", "infused"])
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("sandwich", [0, 1])
def test_the_model_is_the_papers(vocabulary: str, positions: str, cache_length: int, sandwich: int) -> None:
    config = small_config(vocabulary, positions, sandwich)
    model = small_model(config)
    tokens = np.random.default_rng(0).integers(0, VOCAB_SIZE, 18)  # four segments of 4 and a short one
    weights = {name: param.detach().numpy() for name, param in model.named_parameters()}
    expected = textbook.score_row(config, VOCAB_SIZE, weights, tokens.tolist(), L=4, C=cache_length, eos=2)
    protocol = Protocol("cached" if cache_length else "nonoverlapping", 4, cache_length)
    np.testing.assert_allclose(score(model, tokens, protocol, eos=2).nll, expected, atol=1e-6)


def test_batched_segments_score_as_single_ones() -> None:
    model = small_model(small_config("adaptive", "added"))
    tokens = np.random.default_rng(0).integers(0, VOCAB_SIZE, 63)
    one, many = (score(model, tokens, Protocol("nonoverlapping", 4, 0, rows), eos=2).nll for rows in (1, 5))
    np.testing.assert_allclose(one, many, atol=1e-12)


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_gradients_are_those_of_the_loss(vocabulary: str) -> None:
    """Finite differences over two cached segments; the cache itself carries no gradient."""
    model = small_model(small_config(vocabulary, "infused"))
    ids = torch.from_numpy(np.random.default_rng(1).integers(0, VOCAB_SIZE, (2, 9)))
    with torch.no_grad():
        _, cache, *_ = model(ids[:, :4], ids[:, 1:5], model.empty_memory(2, 4))

    def loss() -> torch.Tensor:
        return model(ids[:, 4:8], ids[:, 5:], cache)[0].mean()

    loss().backward()
    for name, param in model.named_parameters():
        direction = torch.randn(param.shape, generator=torch.Generator().manual_seed(0)).double()
        values = []
        for sign in (1, -1):
            with torch.no_grad():
                param.add_(direction, alpha=sign * 1e-6)
                values.append(loss().item())
                param.add_(direction, alpha=-sign * 1e-6)
        expected = (values[0] - values[1]) / 2e-6
        assert (param.grad * direction).sum().item() == pytest.approx(expected, abs=1e-6), name


def test_the_cache_carries_no_gradient() -> None:
    model = small_model(small_config("tied", "infused"))
    ids = torch.arange(8).view(2, 4)
    nll, cache, *_ = model(ids, ids, model.empty_memory(2, 4))
    assert nll.requires_grad
    assert not any(layer.requires_grad for layer in cache.layers)


def test_the_papers_model_has_the_papers_size() -> None:
    def parameters(vocabulary: dict[str, object], vocab_size: int) -> int:
        data = {"layers": 16, "hidden_size": 1024, "heads": 8, "ffn_size": 4096, "vocabulary": vocabulary}
        return count_parameters(ModelConfig.parse(data, source="paper"), vocab_size)

    assert parameters({"kind": "adaptive", "cutoffs": [20000, 60000]}, 267_744) == 246_933_504
    assert parameters({"kind": "tied"}, 29_000) == 231_235_584
    assert parameters({"kind": "untied"}, 29_000) == 260_931_584
