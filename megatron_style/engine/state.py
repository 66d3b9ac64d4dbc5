"""The state of training in the memory of all ranks: weights, the optimizer's state, and buffers that learn without it.

Checkpoints, exports and comparisons read and write it by the names of parameters, whatever the grid is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_style.engine.zero_layout import (
    flat_groups,
    fragments,
    refresh_weights,
    write_fragment,
    write_group,
)
from megatron_style.parallel.sharding import (
    Fragment,
    Layout,
    buffer_layouts_of,
    layout_of,
    layouts_of,
    shard_of,
    unshard,
)
from megatron_style.parallel.topology import Axis, Topology


@dataclass(frozen=True)
class EngineState:
    engine: Any  # DeepSpeed's
    topology: Topology

    @property
    def _model(self) -> nn.Module:
        model: nn.Module = self.engine.module
        return model

    @property
    def _stage(self) -> int:
        return int(self.engine.zero_optimization_stage())

    def load_flat(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Load weights and optimizer state of a checkpoint whose flat tensors are laid out like this engine's."""
        for group, held in zip(flat_groups(self.engine), saved, strict=False):  # further ones are padding
            write_group(group, held)
        refresh_weights(self.engine)

    def fragments(self) -> list[Fragment]:
        return fragments(self.engine, data_rank=self.topology.data.rank)

    def load_logical(self, read: Callable[[str], dict[str, Tensor]]) -> None:
        """Load weights and optimizer state from unsharded tensors, whatever grid they come from."""
        axis = self.topology.tensor
        groups = flat_groups(self.engine)
        # Without ZeRO every rank holds everything, as data rank 0 does.
        held = self.fragments() if self._stage else fragments(self.engine, data_rank=0)
        by_param: dict[str, list[Fragment]] = {}
        for fragment in held:
            by_param.setdefault(fragment.param, []).append(fragment)
        layouts = layouts_of(self._model)
        for name, parts in by_param.items():
            logical = {
                key: shard_of(x, layouts[name], axis).contiguous() if x.dim() else x for key, x in read(name).items()
            }
            for fragment in parts:
                write_fragment(groups[fragment.group], fragment, logical)
        refresh_weights(self.engine)

    def working_weight(self, name: str, offset: int, count: int) -> Tensor:
        """Return a part of this tensor rank's flattened shard of a parameter, as the forward pass reads it. All
        data-parallel ranks have to ask for the same parameter, because ZeRO 3 gathers it from them."""
        param = self._model.get_parameter(name)
        with deepspeed.zero.GatheredParameters([param], enabled=self._stage == 3):
            return param.detach().reshape(-1)[offset : offset + count].clone()

    def full_weight(self, name: str) -> Tensor | None:
        """Return an unsharded parameter in float32, or a buffer that learns outside the optimizer, on the host of the
        first rank, and None on the others. All ranks have to ask for the same one. In addition to the result there are
        at most two shards of it in memory, and on the other ranks one."""
        axis = self.topology.tensor
        buffers = buffer_layouts_of(self._model)
        if name in buffers:
            layout = buffers[name]
            local = self._model.get_buffer(name)
        else:
            param = self._model.get_parameter(name)
            layout = layout_of(param)
            local = _full_shard(param, axis)
        if self.topology.data.rank != 0:
            return None
        return _collected(local, layout, axis)

    def full_buffers(self) -> dict[str, Tensor]:
        """Return, unsharded, the buffers that learn outside the optimizer. The tensor-parallel ranks of a data rank
        have to call it together."""
        axis = self.topology.tensor
        layouts = buffer_layouts_of(self._model).items()
        return {name: _unsharded(self._model.get_buffer(name), layout, axis).cpu().clone() for name, layout in layouts}

    @torch.no_grad()
    def load_buffers(self, read: Callable[[str], Tensor]) -> None:
        """Load the same from unsharded tensors, whatever grid they come from."""
        for name, layout in buffer_layouts_of(self._model).items():
            self._model.get_buffer(name).copy_(shard_of(read(name), layout, self.topology.tensor))


def _full_shard(param: nn.Parameter, axis: Axis) -> Tensor:
    """Gather a parameter's shard from the data-parallel ranks: the float32 master copy, if ZeRO keeps one."""
    local = deepspeed.utils.safe_get_full_fp32_param(param)
    local = param.detach() if local is None else local
    return local.float().view(layout_of(param).shard_shape(axis.size))


def _collected(local: Tensor, layout: Layout, axis: Axis) -> Tensor | None:
    """Return the unsharded tensor on the host of the first rank of the axis, to which the others send their shards one
    after the other."""
    if layout.shard_dim is None or axis.size == 1:
        return local.cpu() if axis.rank == 0 else None
    if axis.rank != 0:
        dist.send(local.contiguous(), group=axis.group, group_dst=0)
        return None
    full = torch.empty(layout.shape, dtype=local.dtype)
    _place(full, local, layout, Axis(axis.size, 0))
    received = torch.empty_like(local, memory_format=torch.contiguous_format)
    for rank in range(1, axis.size):
        dist.recv(received, group=axis.group, group_src=rank)
        _place(full, received, layout, Axis(axis.size, rank))
    return full


def _place(full: Tensor, part: Tensor, layout: Layout, axis: Axis) -> None:
    """Copy a rank's shard, without its padding, to where it belongs."""
    assert layout.shard_dim is not None
    owned = layout.owned(axis)
    target = full.narrow(layout.shard_dim, owned.start, len(owned))
    target.copy_(part.narrow(layout.shard_dim, 0, len(owned)))


def _unsharded(local: Tensor, layout: Layout, axis: Axis) -> Tensor:
    if layout.shard_dim is None or axis.size == 1:
        return local
    parts = [torch.empty_like(local) for _ in range(axis.size)]
    dist.all_gather(parts, local.contiguous(), group=axis.group)
    return unshard(parts, layout.shard_dim, layout.shape[layout.shard_dim])
