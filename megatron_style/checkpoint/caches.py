"""The caches of a checkpoint: each rank writes its features of its rows, and any grid reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from megatron_style.base.command import log
from megatron_style.base.errors import UserError
from megatron_style.checkpoint.manifest import Manifest
from megatron_style.checkpoint.rank_files import RankFiles
from megatron_style.config.model import ModelConfig
from megatron_style.config.run import RunConfig
from megatron_style.engine.engine import TrainingEngine
from megatron_style.model.memory import Memory, memory_of
from megatron_style.parallel.topology import Axis, Topology
from megatron_style.schedule.stages import Stage, StageSchedule


def write_caches(files: RankFiles, caches: Sequence[Memory], topology: Topology) -> None:
    """Write this rank's features of its rows in the order of their lanes, whatever the micro-batches."""
    names = caches[0].tensors if caches else ()
    tensors = {}
    for name in names:
        parts = [cache.tensors[name] for cache in caches]
        tensors[name] = torch.cat(parts).contiguous()
    rows = max(map(len, tensors.values()), default=0)
    first = topology.data.rank * rows
    metadata = {"global_rows": f"{first}..{first + rows}"}
    files.save_tensors(_cache_file(topology.data.rank, topology.tensor.rank), tensors, metadata)


def read_caches(
    folder: Path, manifest: Manifest, engine: TrainingEngine, schedule: StageSchedule, topology: Topology
) -> tuple[Memory, ...]:
    """Return this rank's features of the caches of its rows, from whichever ranks wrote them; none if the next step
    opens new lanes."""
    if manifest.step >= schedule.total_steps or schedule.plan(manifest.step).opens_lanes:
        return ()
    stage = schedule.plan(manifest.step).stage
    if not RunConfig.parse(manifest.run, source=str(folder)).output.save_caches:
        if stage.cache_length and topology.is_first:
            log(f"{folder}: was saved without caches (output.save_caches is false), so its lanes open cold")
        return _cold_caches(engine, stage)
    model = engine.model.config
    axis = topology.tensor
    rows = range(topology.data.rank * stage.rows, (topology.data.rank + 1) * stage.rows)
    wanted = _expected(model, stage, axis.size)
    files = _cache_files(manifest)
    tensors = {name: _read_cache(folder, files, name, rows, axis) for name in wanted}
    _check_memory(tensors, wanted, folder, least=_least_length(model, stage))
    return tuple(map(engine.caches.keep, _split(tensors, model, stage)))


def _cold_caches(engine: TrainingEngine, stage: Stage) -> tuple[Memory, ...]:
    """Return empty caches: the rows continue in their lanes, without the text before them."""
    empty = (engine.model.empty_memory(stage.micro_rows, stage.cache_length) for _ in range(stage.accumulation))
    return tuple(map(engine.caches.keep, empty))


def _split(tensors: Mapping[str, torch.Tensor], model: ModelConfig, stage: Stage) -> tuple[Memory, ...]:
    """Return one memory for each micro-batch."""
    parts = zip(*(tensor.split(stage.micro_rows) for tensor in tensors.values()), strict=True)
    named = (dict(zip(tensors, rows, strict=True)) for rows in parts)
    return tuple(memory_of(model).from_tensors(part, model, stage.cache_length) for part in named)


def _cache_files(manifest: Manifest) -> list[list[str]]:
    """Return the names of the files with caches: for each data-parallel rank, those of its tensor-parallel ranks. In
    checkpoints of format 1, a single file has all features."""
    found = []
    for rank in range(manifest.grid["data"]):
        parts = [_cache_file(rank, part) for part in range(manifest.grid["tensor"])]
        found.append(parts if parts[0] in manifest.files else [f"caches_data_rank_{rank:05d}.safetensors"])
    return found


def _read_cache(folder: Path, files: Sequence[Sequence[str]], name: str, rows: range, axis: Axis) -> torch.Tensor:
    """Return one rank's features of some rows of one tensor."""
    found = []
    first = 0
    for parts in files:
        try:
            with ExitStack() as stack:
                opened = [stack.enter_context(safe_open(folder / part, framework="pt")) for part in parts]
                held = [file.get_slice(name) for file in opened]
                count = held[0].get_shape()[0]
                if inside := _overlap(rows, first, count):
                    found.append(_read_features(held, inside, axis))
                first += count
        except (SafetensorError, IndexError, RuntimeError) as error:
            where = folder / parts[0]
            raise UserError(f"{where}: does not hold the cache of layer {name}, so it is not read ({error})") from None
    return torch.cat(found) if found else torch.empty(0)


def _read_features(held: Sequence[Any], rows: slice, axis: Axis) -> torch.Tensor:
    """Return one rank's share of features that may have been split among another number of ranks."""
    sizes = [part.get_shape()[-1] for part in held]
    each = sum(sizes) // axis.size
    own = range(axis.rank * each, (axis.rank + 1) * each)
    found = []
    first = 0
    for part, size in zip(held, sizes, strict=True):
        if inside := _overlap(own, first, size):
            found.append(part[rows, :, inside])
        first += size
    return torch.cat(found, dim=-1)


def _overlap(wanted: range, first: int, count: int) -> slice | None:
    """Return where `wanted` lies within the `count` elements that begin at `first`, if it does."""
    begin = max(wanted.start, first)
    end = min(wanted.stop, first + count)
    return slice(begin - first, end - first) if begin < end else None


def _expected(model: ModelConfig, stage: Stage, ways: int) -> dict[str, torch.Tensor]:
    """Return one rank's tensors of a full memory of all rows, without content."""
    nowhere = torch.empty(0, device="meta")
    return memory_of(model).full(model, rows=stage.rows, capacity=stage.cache_length, like=nowhere, ways=ways).tensors


def _least_length(model: ModelConfig, stage: Stage) -> int:
    """Return the length of a memory that has read nothing."""
    return memory_of(model).length_after(0, model, stage.cache_length)


def _check_memory(
    tensors: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor], folder: Path, *, least: int
) -> None:
    """Refuse caches of other rows or sizes than this model's, and layers that remember different lengths."""
    lengths = {tensor.shape[1] if tensor.dim() > 1 else -1 for tensor in tensors.values()}
    for name, tensor in tensors.items():
        full = wanted[name].shape
        fits = tensor.dim() == len(full) and least <= tensor.shape[1] <= full[1] and len(lengths) == 1
        if not fits or (*tensor.shape[:1], *tensor.shape[2:]) != (*full[:1], *full[2:]):
            raise UserError(
                f"{folder}: its cache of layer {name} has shape {list(tensor.shape)}; at most {list(full)} is right"
            )


def _cache_file(data_rank: int, tensor_rank: int) -> str:
    return f"caches_data_rank_{data_rank:05d}_tensor_rank_{tensor_rank:02d}.safetensors"
