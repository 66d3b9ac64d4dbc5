"""A checkpoint of any grid, read as whole named tensors: one parameter at a time, straight from DeepSpeed's files."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_style.checkpoint.manifest import Manifest
from megatron_style.parallel.sharding import unshard
from megatron_style.runtime.flat import FlatGroup


class _Opaque:
    """In place of DeepSpeed's own small classes: holds what was in them and runs nothing."""

    def __init__(self, *_: object) -> None: ...


_NOT_NEEDED = (
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
    "builtins.getattr",  # how Python 3.11.0 to 3.11.3 pickles a member of an enumeration; here it reads nothing
)
_OPEN_FILES = 8  # mapped, not loaded: a parameter's stretches lie in neighbouring files


class LogicalReader:
    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._folder, self._manifest = folder, manifest
        self._groups = lru_cache(maxsize=_OPEN_FILES)(self._open)

    def weight(self, name: str) -> Tensor:
        """One parameter, whole, in float32."""
        return self.read(name, with_state=False)["weight"]

    def state(self, name: str) -> dict[str, Tensor]:
        """The optimizer's state of one parameter, whole."""
        found = self.read(name)
        del found["weight"]
        return found

    def read(self, name: str, *, with_state: bool = True) -> dict[str, Tensor]:
        """`weight` and the optimizer's state of one parameter, whole."""
        layout = self._manifest.parameters[name]
        ways = self._manifest.grid["tensor"]
        if layout.shard_dim is None:
            return self._shard(name, 0, with_state)
        shards = [self._shard(name, rank, with_state) for rank in range(ways)]
        size = layout.shape[layout.shard_dim]
        return {
            key: unshard([shard[key] for shard in shards], layout.shard_dim, size) if value.dim() else value
            for key, value in shards[0].items()
        }

    def loss_scaler(self) -> dict[str, Any]:
        """What fp16 training's loss scaler held; the same on every rank."""
        scaler = self._any_rank().get("optimizer_state_dict", {}).get("loss_scaler")
        return {} if scaler is None else vars(scaler)

    def learning_rate(self) -> float:
        """Of the last update."""
        return float(self._optimizer(self._any_rank())["param_groups"][0]["lr"])

    def _any_rank(self) -> dict[str, Any]:
        return _load(self._folder / next(iter(self._manifest.fragments)))

    def _shard(self, name: str, tensor_rank: int, with_state: bool) -> dict[str, Tensor]:
        shape = self._manifest.parameters[name].shard_shape(self._manifest.grid["tensor"])
        shard: dict[str, Tensor] = {}
        for file, found in self._manifest.fragments.items():
            if tensor_rank_of(file) != tensor_rank:
                continue
            for fragment in found:
                if fragment.param != name:
                    continue
                group = self._groups(file)[fragment.group]
                for key, flat in {"weight": group.weights, **(group.state if with_state else {})}.items():
                    if not isinstance(flat, Tensor) or flat.dim() == 0:
                        shard[key] = torch.as_tensor(flat, dtype=torch.float32).reshape(())
                        continue
                    whole = shard.setdefault(key, torch.empty(shape))
                    part = flat.detach().view(-1)[fragment.start : fragment.start + fragment.count]
                    whole.view(-1)[fragment.offset : fragment.offset + fragment.count] = part
        return shard

    def _open(self, file: str) -> list[FlatGroup]:
        state = _load(self._folder / file)
        match self._manifest.grid["zero"]:
            case 0:
                weights = [state["module"][name] for name in self._manifest.parameters]
            case 3:
                weights = state["optimizer_state_dict"]["fp32_flat_groups"]
            case _:
                weights = state["optimizer_state_dict"]["single_partition_of_fp32_groups"]
        states = self._optimizer(state)["state"]
        return [FlatGroup(flat, states.get(index, {})) for index, flat in enumerate(weights)]

    def _optimizer(self, state: dict[str, Any]) -> dict[str, Any]:
        """The state of the optimizer that ZeRO wraps."""
        inner: dict[str, Any]
        match self._manifest.grid["zero"]:
            case 0:
                inner = state["optimizer"]
            case 3:
                inner = state["optimizer_state_dict"]["optimizer_state_dict"]
            case _:
                inner = state["optimizer_state_dict"]["base_optimizer_state"]
        return inner


def file_of(*, zero: int, data_rank: int, tensor_rank: int) -> str:
    """DeepSpeed's name for the file with a rank's optimizer state and float32 weights."""
    if zero == 0:
        return f"mp_rank_{tensor_rank:02d}_model_states.pt"
    return f"zero_pp_rank_{data_rank}_mp_rank_{tensor_rank:02d}_optim_states.pt"


def tensor_rank_of(file: str) -> int:
    return int(file.split("mp_rank_")[1].split("_")[0])


def _load(path: Path) -> dict[str, Any]:
    """Nothing in the file is executed: tensors and plain values only."""
    with torch.serialization.safe_globals([(_Opaque, name) for name in _NOT_NEEDED]):
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    return state
