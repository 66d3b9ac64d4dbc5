"""Read a checkpoint of any grid as unsharded tensors by name: one parameter at a time, from DeepSpeed's own files."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, TypeGuard

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from megatron_style.base.errors import UserError
from megatron_style.checkpoint.manifest import Manifest, tensor_rank_of
from megatron_style.config.run import RunConfig
from megatron_style.engine.saving import Counters
from megatron_style.model.shape import buffers
from megatron_style.parallel.sharding import Fragment
from megatron_style.parallel.topology import Axis


class _Opaque:
    """A stand-in for DeepSpeed's own small classes: holds their content and runs no code."""

    def __init__(self, *_: object) -> None: ...


_NOT_NEEDED = (
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
    "builtins.getattr",  # Python 3.11.0 to 3.11.3 pickle an enum member with it; here it reads nothing
)
BUFFERS = "centroids.safetensors"  # what learns outside the optimizer, if the model has any
_WEIGHT = "weight"
_RATES = ("lr", "momentum", "betas")
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_OPEN_FILES = 1024  # memory-mapped: they take up addresses, not memory


class LogicalReader:
    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._folder = folder
        self._manifest = manifest
        self._groups = lru_cache(maxsize=_OPEN_FILES)(self._open)
        self._places: dict[tuple[str, int], list[tuple[str, Fragment]]] = defaultdict(list)
        for file, found in manifest.fragments.items():
            for fragment in found:
                self._places[fragment.param, tensor_rank_of(file)].append((file, fragment))

    def weight(self, name: str) -> Tensor:
        """Return one parameter, or one buffer that learns outside the optimizer, unsharded, in float32."""
        if name not in self._manifest.parameters:
            return self.buffers[name]
        return self.read(name, lambda key: key == _WEIGHT)[_WEIGHT]

    def state(self, name: str) -> dict[str, Tensor]:
        """Return the optimizer's state of one parameter, unsharded."""
        return self.read(name, lambda key: key != _WEIGHT)

    @torch.no_grad()
    def read(self, name: str, wanted: Callable[[str], bool] = bool) -> dict[str, Tensor]:
        """Return `weight` and the optimizer's state of one parameter, unsharded. In addition to these, one
        tensor-parallel rank's shard is in memory at a time."""
        layout = self._manifest.parameters[name]
        ways = self._manifest.grid["tensor"]
        if layout.shard_dim is None or ways == 1:
            return self._shard(name, 0, wanted)
        full: dict[str, Tensor] = {}
        for rank in range(ways):
            owned = layout.owned(Axis(ways, rank))
            for key, shard in self._shard(name, rank, wanted).items():
                if key not in full:
                    full[key] = torch.empty(layout.shape) if shard.dim() else shard
                if shard.dim():
                    target = full[key].narrow(layout.shard_dim, owned.start, len(owned))
                    target.copy_(shard.narrow(layout.shard_dim, 0, len(owned)))  # without the padding
        return full

    @cached_property
    def buffers(self) -> dict[str, Tensor]:
        """Return what learns outside the optimizer, unsharded: all that the checkpoint's model has of it."""
        path = self._folder / BUFFERS
        model = RunConfig.parse(self._manifest.run, source=str(self._folder)).model
        wanted = {name: shape.shape for name, shape in buffers(model).items()}
        held: dict[str, Tensor] = {}
        if wanted:
            try:
                held = load_file(path)
            except (OSError, SafetensorError) as error:
                raise UserError(f"{path}: does not hold the centroids of its model ({error})") from None
        if {name: tuple(x.shape) for name, x in held.items()} != wanted or not all(map(is_plain, held.values())):
            raise UserError(f"{path}: does not hold the centroids of its model, so it is not read")
        return held

    def flat_groups(self, file: str) -> list[dict[str, Any]]:
        """Return the flat tensors of one rank's file, group by group: `weight`, and the optimizer's state by name."""
        return self._groups(file)

    def counters(self) -> Counters:
        """Return DeepSpeed's counters, which are the same on every rank."""
        with _expecting_deepspeeds(self._folder):
            rank = self._any_rank()
            model = next(name for name in sorted(self._manifest.files) if name.endswith("_model_states.pt"))
            counted = _load(self._folder / model)
            scaler = rank.get("optimizer_state_dict", {}).get("loss_scaler")
            rates = []
            for group in self._optimizer(rank)["param_groups"]:
                rates.append({key: group[key] for key in _RATES if key in group})
            return Counters(
                global_steps=int(counted["global_steps"]),
                global_samples=int(counted["global_samples"]),
                skipped_steps=int(counted["skipped_steps"]),
                loss_scaler={} if scaler is None else dict(vars(scaler)),
                scheduler=dict(counted.get("lr_scheduler") or {}),
                rates=tuple(rates),
            )

    def learning_rate(self) -> float:
        """Return the learning rate of the last update, the highest one if parameter groups differ."""
        with _expecting_deepspeeds(self._folder):
            return max(float(group["lr"]) for group in self._optimizer(self._any_rank())["param_groups"])

    def _any_rank(self) -> dict[str, Any]:
        return _load(self._folder / next(iter(self._manifest.fragments)))

    def _shard(self, name: str, tensor_rank: int, wanted: Callable[[str], bool]) -> dict[str, Tensor]:
        shape = self._manifest.parameters[name].shard_shape(self._manifest.grid["tensor"])
        shard: dict[str, Tensor] = {}
        for file, fragment in self._places[name, tensor_rank]:
            for key, flat in self._group(file, fragment.group).items():
                if not wanted(key) or flat is None:
                    continue
                if not isinstance(flat, Tensor) or flat.dim() == 0:
                    shard[key] = torch.as_tensor(flat, dtype=torch.float32).reshape(())
                    continue
                if key not in shard:
                    shard[key] = torch.empty(shape)
                part = flat.reshape(-1)[fragment.start : fragment.start + fragment.count]
                shard[key].view(-1)[fragment.offset : fragment.offset + fragment.count] = part
        return shard

    def _group(self, file: str, group: int) -> dict[str, Any]:
        groups = self._groups(file)
        if group >= len(groups):
            raise UserError(f"{self._folder / file}: has {len(groups)} groups, but its manifest names more")
        return groups[group]

    def _open(self, file: str) -> list[dict[str, Any]]:
        state = _load(self._folder / file)
        with _expecting_deepspeeds(self._folder / file):
            states = self._optimizer(state)["state"]
            weights = self._flat_weights(file, state)
            found = [{**states.get(index, {}), _WEIGHT: flat} for index, flat in enumerate(weights)]
            if not all(is_plain(group[_WEIGHT]) and group[_WEIGHT].dim() for group in found):
                raise ValueError("a weight is not a tensor of numbers")
            for group in found:
                if not all(map(_is_state, group.values())):
                    raise ValueError("the optimizer's state does not consist of numbers")
            self._check_lengths(file, found)
        return found

    def _check_lengths(self, file: str, groups: list[dict[str, Any]]) -> None:
        for fragment in self._manifest.fragments.get(file, ()):
            for flat in groups[fragment.group].values():
                if isinstance(flat, Tensor) and flat.dim() and fragment.start + fragment.count > flat.numel():
                    raise UserError(f"{self._folder / file}: is shorter than its manifest says, so it is not read")

    def _flat_weights(self, file: str, state: dict[str, Any]) -> list[Any]:
        weights: list[Any]
        match self._manifest.grid["zero"]:
            case 0:
                in_order = sorted(self._manifest.fragments[file], key=lambda fragment: fragment.group)
                weights = [state["module"][fragment.param] for fragment in in_order]
            case 3:
                weights = state["optimizer_state_dict"]["fp32_flat_groups"]
            case _:
                weights = state["optimizer_state_dict"]["single_partition_of_fp32_groups"]
        return weights

    def _optimizer(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the state of the optimizer that ZeRO wraps."""
        inner: dict[str, Any]
        match self._manifest.grid["zero"]:
            case 0:
                inner = state["optimizer"]
            case 3:
                inner = state["optimizer_state_dict"]["optimizer_state_dict"]
            case _:
                inner = state["optimizer_state_dict"]["base_optimizer_state"]
        return inner


def is_plain(value: object) -> TypeGuard[Tensor]:
    """True for a dense tensor of floating point numbers whose elements are all in memory or in its file. A stranger's
    file may hold others: sparse, quantized or complex ones, or a few bytes that expand to a terabyte."""
    return (
        isinstance(value, Tensor)
        and value.dtype in _FLOATS
        and value.layout == torch.strided
        and value.device.type == "cpu"
        and value.untyped_storage().nbytes() >= value.nbytes
    )


def file_of(names: Iterable[str], *, zero: int, data_rank: int, tensor_rank: int) -> str:
    """Return the file with a rank's optimizer state and float32 weights. DeepSpeed prefixes some of these names with
    the precision, so the file is looked up among those that were written."""
    ending = f"mp_rank_{tensor_rank:02d}_model_states.pt"
    if zero > 0:
        ending = f"zero_pp_rank_{data_rank}_mp_rank_{tensor_rank:02d}_optim_states.pt"
    (name,) = (name for name in names if name.endswith(ending))
    return name


def _is_state(value: object) -> bool:
    """True for what an optimizer keeps: tensors, single numbers such as a count of steps, or nothing yet."""
    is_number = isinstance(value, Tensor) and value.dim() == 0 and value.layout == torch.strided
    return value is None or type(value) in (int, float, bool) or is_plain(value) or is_number


@contextmanager
def _expecting_deepspeeds(path: Path) -> Iterator[None]:
    """Refuse a file that holds something other than what DeepSpeed saves."""
    try:
        yield
    except UserError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, StopIteration, OverflowError) as error:
        raise UserError(f"{path}: does not hold what DeepSpeed saves, so it is not read ({error!r})") from None


def _load(path: Path) -> dict[str, Any]:
    """Load tensors and plain values. Nothing in the file is executed; a file that asks for it is refused."""
    try:
        with torch.serialization.safe_globals([(_Opaque, name) for name in _NOT_NEEDED]):
            state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (FileNotFoundError, PermissionError):
        raise
    except Exception as error:  # on foreign bytes the unpickler may raise anything
        reason = str(error).split("\n")[0][:200]
        raise UserError(f"{path}: holds more than tensors and plain values, so it is not loaded ({reason})") from None
    return state
