"""Sinusoidal positions, as in the reference: sines in the first half of the features, cosines in the second."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

_FIRST_ROW = 2  # the reference counts positions from after the padding id, 1


def sinusoids(positions: int, size: int) -> Tensor:
    """Return the table [positions, size] in float32. The first token has position 2."""
    half = size // 2
    rates = torch.exp(torch.arange(half, dtype=torch.float32) * -(math.log(10000) / (half - 1)))
    angles = torch.arange(_FIRST_ROW, _FIRST_ROW + positions, dtype=torch.float32)[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], dim=1)


class SinusoidalPositions(nn.Module):
    """The table of positions, which grows when a longer text needs it."""

    table: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("table", sinusoids(0, size), persistent=False)

    def forward(self, positions: int) -> Tensor:
        if len(self.table) < positions:
            self.table = sinusoids(positions, self.table.shape[1]).to(self.table)
        return self.table[:positions]
