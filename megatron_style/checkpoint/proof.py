"""A save proves itself: what the map says about the written files must be what the engine computes with."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import torch

from megatron_style.checkpoint.logical import LogicalReader
from megatron_style.checkpoint.manifest import Manifest
from megatron_style.engine.engine import TrainingEngine
from megatron_style.parallel.randomness import derive_key
from megatron_style.parallel.sharding import Layout

MOST_ELEMENTS = 2**28  # of a tensor rank's shards are compared in one save; a larger model is sampled, in turns


def difference(folder: Path, manifest: Manifest, engine: TrainingEngine, file: str) -> str | None:
    """Say where this rank's file contradicts the model, if anywhere. Each rank reads back its own file only: together
    they see all. They walk through the same parameters, because ZeRO 3 gathers each."""
    found = manifest.fragments.get(file, ())  # with more ranks than a small model fills, a rank may hold padding only
    mine = {fragment.param: fragment for fragment in found}  # a rank has one of a parameter at most
    flat = LogicalReader(folder, manifest).flat_groups(file)
    problem = None
    for name in compared(manifest.parameters, manifest.step, ways=manifest.grid["tensor"]):
        working = engine.working_weight(name).view(-1)
        if name not in mine:
            continue
        fragment = mine[name]
        written = flat[fragment.group]["weight"].view(-1)[fragment.start : fragment.start + fragment.count]
        held = working[fragment.offset : fragment.offset + fragment.count].cpu()
        if not torch.allclose(written.to(held.dtype), held, rtol=0, atol=0, equal_nan=True):
            problem = problem or f"{file} has other numbers for {name} than the model"
    return problem


def compared(parameters: Mapping[str, Layout], step: int, *, ways: int, most: int = MOST_ELEMENTS) -> list[str]:
    """Choose the parameters that this save compares: all of a small model; of a large one some, others each time."""
    names = list(parameters)
    first = derive_key("proof", step) % len(names)
    chosen: list[str] = []
    elements = 0
    for name in names[first:] + names[:first]:
        elements += math.prod(parameters[name].shard_shape(ways))
        if chosen and elements > most:
            break
        chosen.append(name)
    return chosen
