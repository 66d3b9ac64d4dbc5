"""The optimizers. They keep state per parameter only: ZeRO may call them on any slice of the parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Literal

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from torch import nn

from megatron_style.config.model import OptimizerKind
from megatron_style.config.run import OptimizerConfig
from megatron_style.parallel.sharding import layout_of


class NAG(torch.optim.SGD):
    """Nesterov's accelerated gradient, with the reference's correction of the momentum for the learning rate.

    The reference keeps a velocity v and rescales it whenever the learning rate changes from lr' to lr:

        p += mu^2 (lr/lr') v - (1 + mu) lr g        v = mu (lr/lr') v - lr g

    With v = -lr' u this is  u = mu u + g,  p -= lr (g + mu u):  Nesterov momentum in units of the gradient, which needs
    no record of the last learning rate. Weight decay is decoupled from the gradient, as in the reference."""

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        lr: float,
        momentum: float,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, lr=lr, momentum=momentum, nesterov=momentum > 0, fused=True)
        for group in self.param_groups:
            group.setdefault("decay", weight_decay)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        for group in self.param_groups:
            if group["decay"]:
                for param in group["params"]:
                    if param.grad is not None:
                        param.mul_(1 - group["lr"] * group["decay"])
        return super().step(closure)


def _make_nag(config: OptimizerConfig, model: nn.Module, *, on_cpu: bool) -> torch.optim.Optimizer:
    del on_cpu
    params = parameter_groups(model, config.decay or "all", config.weight_decay, key="decay")
    return NAG(params, lr=0.0, momentum=config.momentum, weight_decay=config.weight_decay)


def _make_adamw(config: OptimizerConfig, model: nn.Module, *, on_cpu: bool) -> torch.optim.Optimizer:
    kind = DeepSpeedCPUAdam if on_cpu else partial(torch.optim.AdamW, fused=True)
    params = parameter_groups(model, config.decay or "matrices", config.weight_decay)
    made: torch.optim.Optimizer = kind(
        params, lr=0.0, betas=config.betas, eps=config.eps, weight_decay=config.weight_decay
    )
    return made


_OPTIMIZERS: Mapping[OptimizerKind, Callable[..., torch.optim.Optimizer]] = {"nag": _make_nag, "adamw": _make_adamw}


def make_optimizer(config: OptimizerConfig, model: nn.Module, *, on_cpu: bool) -> torch.optim.Optimizer:
    """Make the run file's optimizer. With `on_cpu`, ZeRO keeps its state in host memory, where DeepSpeed's own Adam is
    much faster."""
    return _OPTIMIZERS[config.kind](config, model, on_cpu=on_cpu)


def parameter_groups(
    model: nn.Module, decay: Literal["matrices", "all"], weight_decay: float | None, *, key: str = "weight_decay"
) -> list[dict[str, Any]]:
    """Return one parameter group or, if some do not decay, two. With a weight decay of `None`, the optimizer's own
    applies."""
    params = list(model.parameters())
    if decay == "all" or weight_decay == 0:
        return [{"params": params}]
    decaying = [param for param in params if layout_of(param).decays]
    others = [param for param in params if not layout_of(param).decays]
    return [{"params": decaying}, {"params": others, key: 0.0}]
