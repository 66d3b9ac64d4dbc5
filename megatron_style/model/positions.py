"""Sinusoids of positions and of distances: sines in the first half of the features, cosines in the second."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

_FIRST_ROW = 2  # the reference counts positions from after the padding id, 1


def sinusoids(positions: int, size: int) -> Tensor:
    """Return the reference's table [positions, size], in float32. The first token has position 2."""
    half = size // 2
    rates = torch.exp(torch.arange(half, dtype=torch.float32) * -(math.log(10000) / (half - 1)))
    angles = torch.arange(_FIRST_ROW, _FIRST_ROW + positions, dtype=torch.float32)[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], dim=1)


def distance_sinusoids(distances: int, size: int) -> Tensor:
    """Return the table of Transformer-XL [distances, size], in float64; the distance of a token to itself is 0."""
    rates = 10000.0 ** -(torch.arange(0, size, 2, dtype=torch.float64) / size)
    angles = torch.arange(distances, dtype=torch.float64)[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], dim=1)


class SinusoidalPositions(nn.Module):
    """A table of sinusoids, which grows when a longer text needs it."""

    table: Tensor

    def __init__(self, size: int, compute: Callable[[int, int], Tensor] = sinusoids) -> None:
        super().__init__()
        self._compute = compute
        self.register_buffer("table", compute(0, size).float(), persistent=False)

    def forward(self, positions: int) -> Tensor:
        if len(self.table) < positions:
            self.table = self._compute(positions, self.table.shape[1]).to(self.table)
        return self.table[:positions]
