"""A model in whatever form, as this project sees it: a config, and whole tensors by name, read when asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeGuard

import torch
import xxhash
from torch import Tensor

from megatron_style.config.model import ModelFolderConfig
from megatron_style.data.tokenizer import Tokenizer
from megatron_style.model.shortformer import Shortformer
from megatron_style.parallel.sharding import Layout, layout_of, layouts_of, shard_of
from megatron_style.parallel.topology import Axis

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class ModelSource:
    path: Path
    config: ModelFolderConfig
    weight: Callable[[str], Tensor]  # by name, whole
    tokenizer: Callable[[], Tokenizer | None]
    state: Callable[[str], dict[str, Tensor]] | None = None  # the optimizer's, by name; with `config.training`

    @torch.no_grad()
    def load(self, dtype: torch.dtype = torch.float32, axis: Axis | None = None) -> Shortformer:
        """The model, or this rank's shard of it."""
        axis = axis or Axis()
        model = Shortformer(self.config.model, self.config.vocab_size, axis).to(dtype)
        for name, param in model.named_parameters():
            param.copy_(shard_of(self.weight(name), layout_of(param), axis))
        return model

    def without_optimizer(self) -> ModelSource:
        return replace(self, config=self.config.model_copy(update={"training": None}), state=None)

    def digest(self) -> str:
        """Of all weights in float32: the same for every form of one model."""
        total = xxhash.xxh3_128()
        for name in parameters_of(self.config):
            total.update(name.encode())
            total.update(self.weight(name).float().contiguous().numpy().data)
        return total.hexdigest()


def is_plain(value: object) -> TypeGuard[Tensor]:
    """True for a dense tensor of floating point numbers whose elements are all in memory or in its file. A stranger's
    file may hold others: sparse, quantized or imaginary ones, or a few bytes that stand for a terabyte."""
    return (
        isinstance(value, Tensor)
        and value.dtype in _FLOATS
        and value.layout == torch.strided
        and value.device.type == "cpu"
        and value.untyped_storage().nbytes() >= value.nbytes
    )


def parameters_of(config: ModelFolderConfig) -> dict[str, Layout]:
    """Names and shapes of a model's tensors, without the tensors."""
    with torch.device("meta"):
        model = Shortformer(config.model, config.vocab_size)
    return layouts_of(model)
