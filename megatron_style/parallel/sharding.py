"""How a logical parameter is split over the tensor axis. Defined once, and read by initialisation, the gradient norm,
checkpoints and conversion."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron_style.parallel.randomness import derive_key
from megatron_style.parallel.split import Shape
from megatron_style.parallel.topology import Axis

Draw = Callable[[Tensor, torch.Generator], object]  # fills a tensor in place
_ROWS_PER_DRAW = 1024  # weights are drawn in blocks of rows, so that a rank never holds more than its shard and a block


@dataclass(frozen=True)
class Layout(Shape):
    """The shape of a parameter, how it is split, and its initial distribution."""

    draw: Draw | None = None  # None: the module that made it has initialised it

    def owned(self, axis: Axis) -> range:
        """Return the indices along the split dim that a rank holds; the last ranks may hold fewer than the others."""
        assert self.shard_dim is not None
        size = self.shape[self.shard_dim]
        each = -(-size // axis.size)
        return range(min(size, axis.rank * each), min(size, (axis.rank + 1) * each))


@dataclass(frozen=True)
class Fragment:
    """The location of a part of one parameter's shard in the flat tensors of a rank."""

    param: str
    group: int  # which flat tensor
    start: int  # where in it
    count: int
    offset: int  # where in the flattened shard of the parameter


def parameter(layout: Layout, axis: Axis) -> nn.Parameter:
    """Return an uninitialised shard; `initialise` fills it."""
    return tag(nn.Parameter(torch.empty(layout.shard_shape(axis.size))), layout, axis)


def tag(param: nn.Parameter, layout: Layout, axis: Axis) -> nn.Parameter:
    param.logical = layout  # type: ignore[attr-defined]
    # DeepSpeed's gradient norm reads this; without it clipping is silently wrong under tensor parallelism.
    param.tensor_model_parallel = axis.size > 1 and layout.shard_dim is not None  # type: ignore[attr-defined]
    return param


def layout_of(param: nn.Parameter) -> Layout:
    layout: Layout = param.logical  # type: ignore[attr-defined]
    return layout


def layouts_of(model: nn.Module) -> dict[str, Layout]:
    return {name: layout_of(param) for name, param in model.named_parameters()}


def buffer_layouts_of(model: nn.Module) -> dict[str, Layout]:
    """Return the layouts of the buffers that learn outside the optimizer; a module names its own `learning_buffers`."""
    found = {}
    for path, module in model.named_modules():
        for name, layout in getattr(module, "learning_buffers", {}).items():
            found[f"{path}.{name}"] = layout
    return found


def initialise(model: nn.Module, seed: int, axis: Axis) -> None:
    """Draw every weight with a key derived from its name, so that all grids start from the same numbers."""
    for name, param in model.named_parameters():
        initialise_parameter(name, param, seed, axis)
    initialise_buffers(model, seed, axis)


@torch.no_grad()
def initialise_parameter(name: str, param: nn.Parameter, seed: int, axis: Axis) -> None:
    layout = layout_of(param)
    if layout.draw is not None:
        _draw_shard(param, layout, derive_key(seed, "initial", name), axis)


@torch.no_grad()
def initialise_buffers(model: nn.Module, seed: int, axis: Axis) -> None:
    """Draw the buffers that learn outside the optimizer."""
    for name, layout in buffer_layouts_of(model).items():
        _draw_shard(model.get_buffer(name), layout, derive_key(seed, "initial", name), axis)


def _draw_shard(param: Tensor, layout: Layout, key: int, axis: Axis) -> None:
    param.zero_()  # rows that pad the last shards stay zero
    by_rows = layout.shard_dim == 0
    wanted = layout.owned(axis) if by_rows else range(layout.shape[0])
    for block in range(wanted.start // _ROWS_PER_DRAW, -(-wanted.stop // _ROWS_PER_DRAW)):
        first = block * _ROWS_PER_DRAW
        rows = torch.empty(min(_ROWS_PER_DRAW, layout.shape[0] - first), *layout.shape[1:], dtype=torch.float32)
        assert layout.draw is not None
        layout.draw(rows, torch.Generator().manual_seed(derive_key(key, block)))
        if not by_rows:
            param[first : first + len(rows)] = shard_of(rows, layout, axis)
            continue
        keep = range(max(first, wanted.start), min(first + len(rows), wanted.stop))
        param[keep.start - wanted.start : keep.stop - wanted.start] = rows[keep.start - first : keep.stop - first]


def shard(full: Tensor, dim: int, ways: int) -> list[Tensor]:
    """Split into equal parts along `dim`; the last ones are padded with zeros where its size does not divide."""
    each = -(-full.shape[dim] // ways)
    padding = full.new_zeros(*full.shape[:dim], each * ways - full.shape[dim], *full.shape[dim + 1 :])
    return list(torch.cat([full, padding], dim).chunk(ways, dim))


def shard_of(full: Tensor, layout: Layout, axis: Axis) -> Tensor:
    """Return this rank's shard of a logical tensor."""
    if layout.shard_dim is None or axis.size == 1:
        return full
    return shard(full, layout.shard_dim, axis.size)[axis.rank]


def unshard(parts: Sequence[Tensor], dim: int, size: int) -> Tensor:
    return torch.cat(list(parts), dim).narrow(dim, 0, size)


def uniform(bound: float) -> Draw:
    return lambda weight, generator: weight.uniform_(-bound, bound, generator=generator)


def normal(std: float) -> Draw:
    return lambda weight, generator: weight.normal_(0, std, generator=generator)


def zeros(weight: Tensor, generator: torch.Generator) -> object:
    del generator
    return weight.zero_()


def ones(weight: Tensor, generator: torch.Generator) -> object:
    del generator
    return weight.fill_(1.0)


def xavier(fan_in: int, fan_out: int, gain: float = 1.0) -> Draw:
    return uniform(gain * (6 / (fan_in + fan_out)) ** 0.5)
