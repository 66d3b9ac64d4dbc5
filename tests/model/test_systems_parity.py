"""The paper's comparison systems against recorded outputs, in float64."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_style.config.model import ModelConfig
from megatron_style.model.shortformer import Shortformer
from tests.support.oracle import ORACLE, RecordedPositions, oracle_is_here

pytestmark = oracle_is_here
Arrays = Mapping[str, NDArray[np.float64]]


def recorded(name: str) -> Arrays:
    with np.load(ORACLE / "systems" / f"{name}.npz") as file:
        return dict(file)


@torch.no_grad()
def with_weights(config: Mapping[str, object], vocab_size: int, weights: Mapping[str, Tensor]) -> Shortformer:
    model = Shortformer(ModelConfig.parse(config, source="oracle"), vocab_size).double()
    parameters = dict(model.named_parameters())
    assert parameters.keys() == weights.keys()
    for name, param in parameters.items():
        param.copy_(weights[name].reshape(param.shape))
    return model


def sandwich_weights(arrays: Arrays) -> Iterator[tuple[str, Tensor]]:
    """Rename `w.s0.query.weight` to `blocks.0.attention.query.weight`, and so on."""
    for name, array in arrays.items():
        if name == "w.table":
            yield "vocabulary.table.weight", torch.from_numpy(array)
        elif name.startswith("w."):
            _, sublayer, part, kind = name.split(".")
            attention = sublayer[0] == "s"
            inner = f"attention.{part}" if attention else part
            norm = "attention_norm" if attention else "ffn_norm"
            place = norm if part == "norm" else inner
            yield f"blocks.{sublayer[1]}.{place}.{kind}", torch.from_numpy(array)


@pytest.mark.parametrize(("order", "k"), [("sfsfsfsf", 0), ("ssfsfsff", 1), ("sssfsfff", 2), ("ssssffff", 3)])
def test_a_sandwich_is_the_recorded_one(order: str, k: int) -> None:
    arrays = recorded("sandwich")
    config = {
        "layers": 4,
        "hidden_size": 16,
        "heads": 2,
        "ffn_size": 32,
        "positions": "added",
        "cache": False,
        "sandwich": k,
        "vocabulary": {"kind": "tied"},
    }
    model = with_weights(config, 60, dict(sandwich_weights(arrays)))
    model.positions = RecordedPositions(torch.from_numpy(arrays["positions"]))  # type: ignore[assignment]
    ids = torch.from_numpy(arrays["ids"])
    found = model(ids[:, :-1], ids[:, 1:], model.empty_memory(2, 0)).nll
    np.testing.assert_allclose(found.detach().numpy(), arrays[f"nll.{order}"], atol=1e-12)
