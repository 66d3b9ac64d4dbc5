"""A model in any form, as this project sees it: a config, and unsharded tensors by name, read when asked for."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from megatron_style.config.model import ModelFolderConfig
from megatron_style.config.section import Section
from megatron_style.data.tokenizer import Tokenizer
from megatron_style.model.shape import buffers, parameters
from megatron_style.model.shortformer import Shortformer
from megatron_style.parallel.sharding import buffer_layouts_of, layout_of, shard_of
from megatron_style.parallel.split import Shape
from megatron_style.parallel.topology import Axis

# The values that a form can express, by key; those of other keys are the defaults. None: it holds every setting.
Holds = Mapping[str, Container[object]] | None


class _Any:
    def __contains__(self, value: object) -> bool:
        return True


ANY = _Any()


def unheld(config: Section, holds: Holds, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield the settings that a form cannot express. A setting without a default is a size, which every form has."""
    if holds is None:
        return
    for name, field in type(config).model_fields.items():
        key = prefix + name
        value = getattr(config, name)
        is_optional = not field.is_required() and field.default is None  # a section that is there at all counts
        if key not in holds and isinstance(value, Section) and not is_optional:
            yield from unheld(value, holds, f"{key}.")
        elif not field.is_required() and value not in holds.get(key, (field.default,)):
            yield key, value


@dataclass(frozen=True)
class ModelSource:
    path: Path
    config: ModelFolderConfig
    weight: Callable[[str], Tensor]  # by name, unsharded
    tokenizer: Callable[[], Tokenizer | None]
    state: Callable[[str], dict[str, Tensor]] | None = None  # the optimizer's, by name; with `config.training`

    @torch.no_grad()
    def load(self, dtype: torch.dtype = torch.float32, axis: Axis | None = None) -> Shortformer:
        """Return the model, or this rank's shard of it."""
        axis = axis or Axis()
        model = Shortformer(self.config.model, self.config.vocab_size, axis).to(dtype)
        for name, param in model.named_parameters():
            param.copy_(shard_of(self.weight(name), layout_of(param), axis))
        for name, layout in buffer_layouts_of(model).items():
            model.get_buffer(name).copy_(shard_of(self.weight(name), layout, axis))
        return model

    def without_optimizer(self) -> ModelSource:
        return replace(self, config=self.config.model_copy(update={"training": None}), state=None)

    def digest(self) -> str:
        """Return a digest of all weights in float32, which is the same for every form of a model."""
        total = xxhash.xxh3_128()
        for name in tensors_of(self.config):
            total.update(name.encode())
            total.update(self.weight(name).float().contiguous().numpy().data)
        return total.hexdigest()


def parameters_of(config: ModelFolderConfig) -> dict[str, Shape]:
    """Return names and shapes of a model's parameters, in the model's order."""
    return parameters(config.model, config.vocab_size)


def tensors_of(config: ModelFolderConfig) -> dict[str, Shape]:
    """Return names and shapes of all that a model has learned: parameters, and what learns outside the optimizer."""
    return parameters_of(config) | buffers(config.model)
