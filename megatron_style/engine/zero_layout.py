"""How ZeRO lays out parameters: flat float32 tensors, of which each rank holds a part, with optimizer state like them.

A *fragment* is the location of a part of one parameter's shard in them. Without ZeRO every parameter is a flat tensor
of its own. With the fragments of all ranks, a checkpoint can be read without DeepSpeed and on any other grid.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer  # DeepSpeed's choice at ZeRO 1 for bf16 summed in float32
from torch import Tensor, nn

from megatron_style.base.errors import UserError
from megatron_style.parallel.sharding import Fragment, initialise_buffers, initialise_parameter
from megatron_style.parallel.topology import Topology


class MpuView:
    """The topology, with the method names that DeepSpeed expects."""

    def __init__(self, topology: Topology) -> None:
        for name, axis in (("data", topology.data), ("model", topology.tensor), ("tensor_model", topology.tensor)):
            setattr(self, f"get_{name}_parallel_rank", lambda axis=axis: axis.rank)
            setattr(self, f"get_{name}_parallel_world_size", lambda axis=axis: axis.size)
            setattr(self, f"get_{name}_parallel_group", lambda axis=axis: axis.group)


def initialise_partitioned(model: nn.Module, seed: int, topology: Topology, ds_config: dict[str, Any]) -> None:
    """Draw one parameter after the other, and let ZeRO 3 partition each before the next is drawn: a rank never holds
    more than its shard and one parameter."""
    dtype = _working_dtype(ds_config)
    partitioned: nn.Parameter | None = None
    for name, param in model.named_parameters():  # one that is not drawn yet has addresses, but no memory
        initialise_parameter(name, param, seed, topology.tensor)
        param.data = param.data.to(dtype)  # DeepSpeed casts only what it partitions itself
        if partitioned is None:
            partitioned = param
            _partition_first(param, dtype, topology, ds_config)
        else:
            partitioned.convert_to_zero_parameters(param_list=[param])  # type: ignore[attr-defined]
    initialise_buffers(model, seed, topology.tensor)
    _move_buffers(model)


def _partition_first(param: nn.Parameter, dtype: torch.dtype, topology: Topology, ds_config: dict[str, Any]) -> None:
    """Partition a parameter, and give it the method that partitions others."""
    holder = nn.ParameterList([param])
    group = topology.data.group
    deepspeed.zero.Init(
        holder, data_parallel_group=group, dtype=dtype, config_dict_or_path=ds_config, mpu=MpuView(topology)
    )


def _working_dtype(ds_config: Mapping[str, Any]) -> torch.dtype:
    """Return the precision of the weights that the forward pass reads."""
    for key, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        if ds_config.get(key, {}).get("enabled", False):
            return dtype
    return torch.float32


def _move_buffers(model: nn.Module) -> None:
    """Move the buffers to this rank's device: DeepSpeed moves no module that is partitioned already."""
    device = torch.device(get_accelerator().current_device_name())
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(device)


@dataclass(frozen=True)
class FlatGroup:
    weights: Tensor  # float32 where ZeRO keeps a master copy; without ZeRO, one parameter in its own shape
    state: dict[str, Any]  # the optimizer's: tensors as long as the weights, and single numbers


def flat_groups(engine: Any) -> list[FlatGroup]:
    """Return this rank's flat tensors, in DeepSpeed's order."""
    optimizer = engine.optimizer
    match engine.zero_optimization_stage():
        case 0:
            return [FlatGroup(param.data, optimizer.state[param]) for param in _parameters_in_order(optimizer)]
        case 3:
            flats = optimizer.fp32_partitioned_groups_flat
        case _ if isinstance(optimizer, BF16_Optimizer):
            flats = optimizer.fp32_groups_flat_partition
        case _:
            flats = optimizer.single_partition_of_fp32_groups
    return [FlatGroup(flat.data, optimizer.optimizer.state[flat]) for flat in flats]


def fragments(engine: Any, *, data_rank: int) -> list[Fragment]:
    match engine.zero_optimization_stage():
        case 0:
            return _unsliced_fragments(engine) if data_rank == 0 else []  # the other ranks hold the same
        case 3:
            return _partitioned_fragments(engine, data_rank)
        case _:
            return _sliced_fragments(engine)


def _unsliced_fragments(engine: Any) -> list[Fragment]:
    names = {param: name for name, param in engine.module.named_parameters()}
    params = _parameters_in_order(engine.optimizer)
    return [Fragment(names[param], i, 0, param.numel(), 0) for i, param in enumerate(params)]


def _sliced_fragments(engine: Any) -> list[Fragment]:
    """Return the fragments of ZeRO 1 and 2, which lay the parameters of each optimizer group end to end and cut that
    into equal slices."""
    names = {param: name for name, param in engine.module.named_parameters()}
    found = []
    optimizer = engine.optimizer
    groups = optimizer.bf16_groups if isinstance(optimizer, BF16_Optimizer) else optimizer.bit16_groups
    for group, params in enumerate(groups):
        for param in params:
            mapping = param._hp_mapping
            if mapping is not None:
                in_flat = mapping.hp_fragment_address
                in_shard = mapping.lp_fragment_address
                found.append(Fragment(names[param], group, in_flat.start, in_flat.numel, in_shard.start))
    return found


def _parameters_in_order(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Return the parameters in the order in which torch numbers them in a saved optimizer state: group by group."""
    return list(chain.from_iterable(group["params"] for group in optimizer.param_groups))


def _partitioned_fragments(engine: Any, data_rank: int) -> list[Fragment]:
    """Return the fragments of ZeRO 3, which cuts each parameter into equal parts, the last ones padded."""
    names = {param: name for name, param in engine.module.named_parameters()}
    found = []
    for group, params in enumerate(engine.optimizer.fp16_groups):
        start = 0
        for param in params:
            part = param.ds_tensor.ds_numel
            offset = data_rank * part
            count = max(0, min(part, param.ds_numel - offset))
            if count:
                found.append(Fragment(names[param], group, start, count, offset))
            start += part
    return found


@contextmanager
def without_optimizer(engine: Any) -> Iterator[None]:
    """Leave out the optimizer's own step in an update: it alone changes the training state."""
    optimizer = engine.optimizer
    steps = [(optimizer, "_optimizer_step" if engine.zero_optimization_stage() else "step")]
    if isinstance(optimizer, BF16_Optimizer):  # it also links the state that the first step made
        steps = [(optimizer.optimizer, "step"), (optimizer, "_lazy_init_hp_params_optimizer_state")]
    for holder, name in steps:
        setattr(holder, name, lambda *_: None)
    try:
        yield
    finally:
        for holder, name in steps:
            delattr(holder, name)  # uncovers the method of the class


def state_of_first_step(engine: Any) -> list[Tensor]:
    """Return tensors like those that the optimizer's first step will make, or none if it has made them already. What
    torch's optimizers keep is found by a step on a single element."""
    base = getattr(engine.optimizer, "optimizer", engine.optimizer)
    if any(base.state.values()):
        return []
    flats = [group.weights for group in flat_groups(engine)]
    made = []
    for flat in flats:
        made += [torch.zeros_like(flat, dtype=dtype) for dtype in _kept_per_element(base, flat)]
    return made


def _kept_per_element(base: torch.optim.Optimizer, like: Tensor) -> list[torch.dtype]:
    if type(base).__module__.startswith("deepspeed."):
        return [like.dtype] * 2  # Adam's moments; none of DeepSpeed's own keeps more
    element = nn.Parameter(like.new_zeros(1))
    element.grad = torch.zeros_like(element)
    trial = copy.copy(base)
    trial.param_groups = [{**base.param_groups[0], "params": [element]}]
    trial.state = defaultdict(dict)
    trial.step()
    return [value.dtype for value in trial.state[element].values() if isinstance(value, Tensor) and value.dim()]


def refresh_weights(engine: Any) -> None:
    """Copy the flat weights into the model's own, which may be in half precision."""
    match engine.zero_optimization_stage():
        case 0:
            pass
        case 3:
            for group in range(len(engine.optimizer.fp16_groups)):
                engine.optimizer._reassign_or_swap_out_partitioned_parameters(group)
            persistent = engine.optimizer.persistent_parameters
            if persistent:
                persistent[0].partition(persistent, has_been_updated=False)
                persistent[0].all_gather(persistent)
        case _:
            engine.optimizer.update_lp_params()


@torch.no_grad()
def write_fragment(group: FlatGroup, fragment: Fragment, logical: dict[str, Tensor]) -> None:
    """Copy a part of a parameter's shard (`weight`, and optimizer state by name) into the flat tensors."""
    for name, values in logical.items():
        if name == "weight":
            target = group.weights
        elif values.dim() == 0:  # a number that all parameters share, such as Adam's step
            was = group.state.get(name)
            group.state[name] = type(was)(values.item()) if isinstance(was, int | float) else values.clone()
            continue
        else:  # the optimizer may not have made its state before its first step
            target = group.state.setdefault(name, torch.zeros_like(group.weights))
        part = values.reshape(-1)[fragment.offset : fragment.offset + fragment.count]
        target.view(-1)[fragment.start : fragment.start + fragment.count].copy_(part)


@torch.no_grad()
def write_group(group: FlatGroup, held: Mapping[str, Any]) -> None:
    """Copy one flat tensor of a file: its `weight`, perhaps without padding, and the optimizer's state."""
    size = min(group.weights.numel(), held["weight"].numel())  # the longer one ends in padding
    group.weights.view(-1)[:size].copy_(held["weight"].reshape(-1)[:size])
    for name, value in held.items():
        if name == "weight":
            continue
        if isinstance(value, Tensor) and value.dim() and value.numel() != group.weights.numel():
            raise UserError(
                f"the checkpoint's {name} has {value.numel()} elements, and this engine's {group.weights.numel()}; the "
                f"file is damaged or of another model"
            )
        if isinstance(value, Tensor):  # a number, such as Adam's step, stays on the host
            value = value.to(group.weights.device if value.dim() else value.device, copy=True)
        group.state[name] = value
