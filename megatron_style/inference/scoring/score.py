"""The score of a text: the loss of each of its tokens."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_style.inference.scoring.modes import MODES
from megatron_style.inference.scoring.protocol import Protocol
from megatron_style.inference.scoring.reader import Reader, Tokens
from megatron_style.model.shortformer import Shortformer
from megatron_style.parallel.topology import Axis

Progress = Callable[[int], object]
KeepKeys = Callable[[int, Tensor], object]  # called with the index of the first token, and the keys [tokens, D]
_Unit = TypeVar("_Unit")


@dataclass(frozen=True)
class Score:
    nll: NDArray[np.float64]  # in nats, for each token of the stream

    @property
    def loss(self) -> float:
        return float(self.nll.mean())

    @property
    def perplexity(self) -> float:
        return perplexity(self.loss)

    def by_place(self, protocol: Protocol) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return the number of tokens scored at each position of the segment, and their mean loss (nan for none)."""
        places = protocol.places(len(self.nll))
        counts = np.bincount(places)
        sums = np.bincount(places, self.nll)
        return counts, np.divide(sums, counts, out=np.full(len(counts), np.nan), where=counts > 0)

    def by_band(self, protocol: Protocol, bands: int = 16) -> list[float]:
        """Return the mean loss over equal stretches of the segment, or at each position of a shorter one."""
        counts, losses = self.by_place(protocol)
        cut = np.array_split(np.arange(len(counts)), min(bands, len(counts)))
        return [float(np.average(losses[places], weights=counts[places])) for places in cut]


def perplexity(loss: float) -> float:
    return math.exp(min(loss, 700))


@torch.no_grad()
def score(
    model: Shortformer,
    tokens: Tokens,
    protocol: Protocol,
    *,
    eos: int,
    axis: Axis = Axis(),  # noqa: B008  frozen
    progress: Progress = lambda _: None,
    keep_keys: KeepKeys | None = None,
) -> Score:
    """Score a text. Memories are local variables: scoring between two training steps does not change the training.

    The passes are divided among the ranks of `axis`; each rank gets the complete score. `keep_keys` is called with the
    keys of this rank's passes."""
    reader = Reader(model, tokens, eos, wants_keys=keep_keys is not None, lookback=protocol.cache_length)
    mode = MODES[protocol.mode]
    nll = torch.zeros(len(tokens), dtype=torch.float64, device=model.positions.table.device)
    times = torch.zeros(len(tokens), dtype=torch.int8, device=nll.device)
    for part in mode.read_share(reader, protocol, axis):
        nll[part.first : part.first + len(part.nll)] = part.nll
        times[part.first : part.first + len(part.nll)] += 1
        if keep_keys and part.keys is not None:
            keep_keys(part.first, part.keys)
        progress(len(part.nll))
    assert bool((axis.sum(times) == 1).all()), "a token was scored twice, or never"
    return Score(axis.sum(nll).cpu().numpy())
