"""Recorded outputs of the reference implementation, where they are available.

CPUs round float32 `exp` differently, and so the rates of the sinusoids. Tests against recorded outputs therefore use
the recorded positions: `reference_model` loads the table into the model; commands and exported code, which make a table
of their own, get the recorded rates from `needs_oracle`.

The table is 64 features wide. Run d, 32 wide, has no recorded table and needs none: its losses are in float32.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from megatron_style.formats import fairseq
from megatron_style.model.memory import Memory
from megatron_style.model.shortformer import Shortformer
from megatron_style.model.vocabulary import AdaptiveVocabulary

Test = TypeVar("Test", bound=Callable[..., Any])
ORACLE = Path(__file__).resolve().parents[2].parent / "shared" / "oracle"
oracle_is_here = pytest.mark.skipif(
    not ORACLE.is_dir(), reason="the reference's recorded outputs (shared/oracle next to this checkout) are absent"
)
IGNORED_TAIL_WORDS = (1001, 4001)  # the reference's training loss omits the tail term of these two
_exp = torch.exp


def needs_oracle(test: Test) -> Test:
    """Run the test with the recorded rates of the positions, or skip it where nothing is recorded."""
    decorated: Test = oracle_is_here(patch.object(torch, "exp", _exp_as_recorded)(test))
    return decorated


def reference_model(checkpoint: str, dtype: torch.dtype = torch.float64) -> Shortformer:
    """Load a checkpoint of the reference with the reference's own table of positions."""
    model = fairseq.read(ORACLE / "ckpt" / f"{checkpoint}.pt").load(dtype)
    return with_recorded_positions(model)


def with_recorded_positions(model: Shortformer) -> Shortformer:
    table = recorded_sinusoids()
    if table.shape[1] == model.config.hidden_size:
        model.positions = RecordedPositions(table.to(next(model.parameters())))  # type: ignore[assignment]
    return model


class RecordedPositions(nn.Module):
    """The reference's table. It cannot grow: new rows would have this CPU's rates."""

    table: Tensor

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.register_buffer("table", table, persistent=False)

    def forward(self, positions: int) -> Tensor:
        assert positions <= len(self.table), f"{len(self.table)} positions are recorded, {positions} are needed"
        return self.table[:positions]


def recorded_sinusoids() -> Tensor:
    """Return the recorded table [78, 64]. Its first two rows are left out: no token has their positions."""
    return torch.from_numpy(np.load(ORACLE / "sinusoid.npz")["table"][2:])


@lru_cache
def recorded_rates() -> Tensor:
    """Return the rates that the recorded table was made of: of the float32 numbers nearest to each exact rate, the one
    whose sines and cosines are the recorded ones."""
    table = recorded_sinusoids()
    exact = exponents(table.shape[1]).double().exp().float()
    down, up = (torch.nextafter(exact, torch.tensor(end)) for end in (0.0, 2.0))
    candidates = torch.stack([exact, down, up])
    positions = torch.arange(2, 2 + len(table), dtype=torch.float32)
    angles = (positions[:, None, None] * candidates).double()
    sines, cosines = table.chunk(2, dim=1)
    misses = (angles.sin() - sines[:, None]).abs() + (angles.cos() - cosines[:, None]).abs()
    return candidates.gather(0, misses.sum(0).argmin(0)[None])[0]


def exponents(size: int) -> Tensor:
    """Return the logarithms of the rates, as the reference rounds them."""
    half = size // 2
    return torch.arange(half, dtype=torch.float32) * -(math.log(10000) / (half - 1))


def _exp_as_recorded(x: Tensor) -> Tensor:
    if x.is_meta:  # models are built without weights first
        return _exp(x)
    rates = recorded_rates()
    is_of_the_table = x.dtype == rates.dtype and torch.equal(x, exponents(2 * len(rates)))
    return rates.clone() if is_of_the_table else _exp(x)


def recorded(path: str) -> Any:
    return json.loads((ORACLE / path).read_text())


def recorded_tokens(split: str) -> NDArray[np.int64]:
    return np.fromfile(ORACLE / "data" / f"{split}.bin", dtype="<u2").astype(np.int64)


def read_blocks(tokens: NDArray[np.int64], ids: list[int], length: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets whose rows are the blocks with these numbers; </s> comes before the corpus."""
    inputs = np.concatenate([[2], tokens[:-1]])
    rows = [slice(block * length, (block + 1) * length) for block in ids]
    return _stacked(inputs, rows), _stacked(tokens, rows)


def _stacked(array: NDArray[np.int64], rows: list[slice]) -> Tensor:
    return torch.from_numpy(np.stack([array[row] for row in rows]))


def reference_loss(model: Shortformer, ids: Tensor, targets: Tensor, cache: Memory) -> tuple[Tensor, Memory]:
    """Return the sum over the batch without the two tail terms that the reference omits."""
    nll, next_cache, *_ = model(ids, targets, cache)
    vocabulary = model.vocabulary
    if not isinstance(vocabulary, AdaptiveVocabulary):
        return nll.sum(), next_cache
    x_BTD = model.features(ids, cache).x
    clusters = x_BTD @ vocabulary.clusters.T
    words = x_BTD @ vocabulary.bands[0].table.weight.T
    cluster_nll = torch.cat([words, clusters], -1).logsumexp(-1, keepdim=True) - clusters
    for tail, word in enumerate(IGNORED_TAIL_WORDS):
        nll = torch.where(targets == word, cluster_nll[..., tail], nll)
    return nll.sum(), next_cache
