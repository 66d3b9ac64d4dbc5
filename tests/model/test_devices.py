"""Forward and backward never wait for the device. Tensors on `meta` have no values, so code that reads one, or mixes
them with tensors on the CPU, fails."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_style.config.model import ModelConfig
from megatron_style.model.shortformer import Shortformer

_VOCABULARIES = [{"kind": "adaptive", "cutoffs": [20, 50]}, {"kind": "tied"}, {"kind": "untied"}]


@pytest.mark.parametrize("vocabulary", _VOCABULARIES, ids=lambda each: each["kind"])
@pytest.mark.parametrize(("positions", "cache"), [("infused", 8), ("added", 0)])
@pytest.mark.parametrize("recompute", [False, True])
def test_nothing_asks_the_device(vocabulary: dict[str, Any], positions: str, cache: int, recompute: bool) -> None:
    sizes = {"layers": 2, "hidden_size": 32, "heads": 2, "ffn_size": 64}
    config = ModelConfig.parse(sizes | {"positions": positions, "vocabulary": vocabulary}, source="test")
    with torch.device("meta"):
        model = Shortformer(config, 100, recompute=recompute)
    on_host, kept = torch.arange(24).view(3, 8) * 4, model.empty_memory(3, cache)
    for _ in range(2):  # the second segment finds the first in the cache
        nll, kept, *_ = model(on_host, on_host, kept)
        nll.sum().backward()
    assert nll.device.type == "meta"
    assert nll.shape == on_host.shape
    assert kept.length == cache
