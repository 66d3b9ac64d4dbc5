"""The reference's optimizer and clipping: one parameter after the other."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn


class PlainNAG:
    """Nesterov's accelerated gradient on velocities that carry the learning rate."""

    def __init__(self, params: Iterable[nn.Parameter], *, momentum: float, clip_norm: float) -> None:
        self.params = list(params)
        self.momentum = momentum
        self.clip_norm = clip_norm
        self.last_rate = 0.0
        self.velocities = [torch.zeros_like(param) for param in self.params]

    @torch.no_grad()
    def step(self, rate: float) -> None:
        gradients = [param.grad for param in self.params if param.grad is not None]
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        scale = min(1.0, self.clip_norm / (norm.item() + 1e-6))
        change = rate / self.last_rate if self.last_rate else 1.0
        for param, velocity in zip(self.params, self.velocities, strict=True):
            gradient = param.grad.mul_(scale)  # type: ignore[union-attr]
            param.add_(velocity, alpha=self.momentum**2 * change)
            param.add_(gradient, alpha=-(1 + self.momentum) * rate)
            velocity.mul_(self.momentum * change).add_(gradient, alpha=-rate)
            param.grad = None
        self.last_rate = rate
