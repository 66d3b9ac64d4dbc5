"""This process's place in the data x tensor grid, and its process groups."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_style.base.errors import UserError


@dataclass(frozen=True)
class Axis:
    """One direction of the process grid. `Axis()` is a single process, which communicates with no other."""

    size: int = 1
    rank: int = 0
    group: dist.ProcessGroup | None = None

    def sum(self, value: Tensor) -> Tensor:
        total = value.clone()
        if self.size > 1:
            dist.all_reduce(total, group=self.group)
        return total

    def gather_along(self, dim: int, value: Tensor) -> Tensor:
        """Return the values of all ranks, joined in rank order along `dim`."""
        if self.size == 1:
            return value
        joined = value.new_empty(self.size * len(value), *value.shape[1:])  # along the first dim, as backends expect
        if value.numel():
            dist.all_gather_into_tensor(joined, value.contiguous(), group=self.group)
        values: Tensor = joined.view(self.size, *value.shape)
        return values.movedim(0, dim).flatten(dim, dim + 1)

    def sum_share(self, dim: int, value: Tensor) -> Tensor:
        """Return this rank's share, along `dim`, of the sum over all ranks."""
        if self.size == 1:
            return value
        shares = value.unflatten(dim, (self.size, -1)).movedim(dim, 0).contiguous()
        total = torch.empty_like(shares[0])
        dist.reduce_scatter_tensor(total, shares.flatten(0, 1), group=self.group)
        return total

    def gather(self, value: Tensor) -> list[Tensor]:
        """Return the values of all ranks, which must have one shape, in rank order."""
        if self.size == 1:
            return [value]
        values = [torch.empty_like(value) for _ in range(self.size)]
        dist.all_gather(values, value.contiguous(), group=self.group)
        return values

    def shift(self, value: Tensor) -> Tensor:
        """Return the value of the rank before this one, which must have the same shape; rank 0 gets the last rank's."""
        if self.size == 1:
            return value
        assert self.group is not None
        received = torch.empty_like(value, memory_format=torch.contiguous_format)
        ranks = dist.get_process_group_ranks(self.group)
        following = ranks[(self.rank + 1) % self.size]
        previous = ranks[self.rank - 1]
        sends = dist.P2POp(dist.isend, value.contiguous(), following, self.group)
        receives = dist.P2POp(dist.irecv, received, previous, self.group)
        for request in dist.batch_isend_irecv([sends, receives]):
            request.wait()
        return received


@dataclass(frozen=True)
class Topology:
    """The grid of processes. Ranks with the same data rank are neighbours, so that tensor parallelism stays inside a
    host."""

    data: Axis = Axis()
    tensor: Axis = Axis()

    @property
    def is_first(self) -> bool:
        return self.data.rank == 0 and self.tensor.rank == 0

    @classmethod
    def of_world(cls, *, tensor: int) -> Topology:
        world = dist.get_world_size()
        rank = dist.get_rank()
        check_world(world, tensor)
        return cls(
            data=_join([range(first, world, tensor) for first in range(tensor)], rank),
            tensor=_join([range(first, first + tensor) for first in range(0, world, tensor)], rank),
        )


def check_world(world: int, tensor: int) -> None:
    if world % tensor:
        fitting = [n for n in range(1, world + 1) if world % n == 0]
        raise UserError(
            f"parallel.tensor ({tensor}) must divide the {world} processes of this launch; one of {fitting} would"
        )


def _join(partitions: list[range], rank: int) -> Axis:
    """Create every group, which is a collective call, and return the axis of the one that holds this rank."""
    axis = Axis()
    for ranks in partitions:
        group = dist.new_group(list(ranks))
        if rank in ranks:
            axis = Axis(size=len(ranks), rank=ranks.index(rank), group=group)
    return axis
