"""Replace a GPU, the other ranks and all numbers while one rank of a grid is rehearsed on fake tensors.

Fake tensors have a shape, a dtype and a storage of some size, but no numbers. Here they represent those of the GPU,
whatever torch calls their device; tensors of the host are real. Everything that is not listed here is real.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from megatron_style.parallel.dropout import MaskSource
from megatron_style.rehearsal.live_bytes import LiveBytes


@contextmanager
def fake_rank(rank: int, *, of: int) -> Iterator[LiveBytes]:
    """Make this process one rank of a grid that does not exist, and its tensors fake; yield the meter of their bytes.

    DeepSpeed keeps global state, so do not train in the same process afterwards."""
    with ExitStack() as stack:
        stack.enter_context(patch.dict(os.environ, {"LOCAL_RANK": "0"}))  # DeepSpeed's engine needs it
        # A failure is reported once, by the caller that catches it.
        stack.enter_context(patch.object(logging.getLogger("torch._subclasses.fake_tensor"), "disabled", True))
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")  # DeepSpeed's alignment
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=of)
        stack.callback(dist.destroy_process_group)
        for place, replacement in _REPLACED.items():
            stack.enter_context(patch(place, replacement))
        # fp16 is refused where the accelerator does not support it; the GPU that is meant does.
        stack.enter_context(patch.object(get_accelerator(), "is_fp16_supported", lambda: True))
        stack.enter_context(FakeTensorMode())
        stack.enter_context(_NumbersAreZero())  # type: ignore[no-untyped-call]
        yield stack.enter_context(LiveBytes())


class HostTensor(Tensor):
    """A tensor that stays real among fake ones, so that a search for token ids on the host gives real counts. Moved to
    the GPU, it becomes fake; an operation that mixes it with tensors of the GPU fails, as it would there."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = tree_leaves((args, kwargs))
        if func is Tensor.to and any(isinstance(leaf, torch.device) for leaf in leaves):
            return torch.empty(args[0].shape, dtype=args[0].dtype)
        if any(isinstance(leaf, FakeTensor) for leaf in leaves):
            raise RuntimeError(f"{func.__name__}: one tensor is on the host, another on the GPU")
        with _disable_current_modes():
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]


class _NumbersAreZero(TorchDispatchMode):
    """A mode in which every number that the host reads is zero. Before an update it reads a norm and an overflow flag:
    with zeros, the update is applied."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        if func is torch.ops.aten._local_scalar_dense.default:
            return 0.0 if args[0].is_floating_point() else 0
        return func(*args, **(kwargs or {}))


def _flash_attention(
    q_BHTE: Tensor, cached: tuple[Tensor, Tensor], inside: tuple[Tensor, Tensor], *, dropout: float
) -> Tensor:
    keys, values = inside
    if cached[0].shape[2]:
        keys, values = (torch.cat(part, dim=2) for part in zip(cached, inside, strict=True))
    out: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(q_BHTE, keys, values, dropout, True)[0]
    return out


def _drawn(source: MaskSource, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    del source
    return torch.empty(shape, dtype=dtype)


def _to_host(x: Tensor, *, pinned: bool) -> Tensor:
    del pinned
    return torch.empty_like(x, device="meta")


def _to_device(x: Tensor, device: torch.device) -> Tensor:
    return torch.empty_like(x, device=device)


def _convert_in_place(module: nn.Module, convert: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    for child in module.children() if recurse else ():
        _convert_in_place(child, convert)
    for param in module._parameters.values():
        if param is not None:
            param.data = convert(param.data)
    for name, buffer in module._buffers.items():
        module._buffers[name] = None if buffer is None else convert(buffer)
    return module


_REPLACED = {
    # The kernels of a GPU; those of a CPU keep other tensors for the backward pass.
    "megatron_style.model.attention.attend": _flash_attention,
    # Masks are fake as well, and a GPU applies each at once.
    "megatron_style.parallel.dropout.MaskSource.draw": _drawn,
    "megatron_style.parallel.dropout._CHUNK": 2**62,
    # A cache on the host has a shape only; the meter does not count it.
    "megatron_style.model.caches.to_host": _to_host,
    "megatron_style.model.caches.to_device": _to_device,
    # Fake tensors have no numbers to initialise.
    "megatron_style.engine.build.initialise": lambda *_: None,
    "megatron_style.engine.build.initialise_partitioned": lambda *_: None,
    # torch would swap each fake parameter with its converted copy, and fails because fake mode holds references to it.
    "torch.nn.Module._apply": _convert_in_place,
    # The first rank, which does not exist, agrees with this one.
    "deepspeed.runtime.zero.utils.assert_lst_len_same_as_other_ranks": lambda _: None,
    "deepspeed.runtime.zero.utils.get_lst_from_rank0": lambda numbers: numbers,
    # A rehearsal writes no logs and contacts no service.
    "deepspeed.runtime.engine.MonitorMaster": lambda *_: SimpleNamespace(enabled=False),
}
