"""The proof of a save: the written files, read by their manifest, must hold what the engine computes with."""

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

MOST_ELEMENTS = 2**28  # of a tensor rank's shards that one save compares; a larger model is sampled, in turns


def difference(folder: Path, manifest: Manifest, engine: TrainingEngine, file: str) -> str | None:
    """Describe where this rank's file contradicts the model, if anywhere. Each rank reads back its own file only, and
    together they see all. They visit the same parameters, because ZeRO 3 gathers each from all ranks."""
    found = manifest.fragments.get(file, ())  # of a small model, some ranks may hold padding only
    held = {fragment.param: fragment for fragment in found}  # a rank has at most one of each parameter
    flat = LogicalReader(folder, manifest).flat_groups(file)
    problem = None
    for name in compared(manifest.parameters, manifest.step, ways=manifest.grid["tensor"]):
        working = engine.working_weight(name).view(-1)
        if name not in held:
            continue
        fragment = held[name]
        written = flat[fragment.group]["weight"].view(-1)[fragment.start : fragment.start + fragment.count]
        expected = working[fragment.offset : fragment.offset + fragment.count].cpu()
        if not torch.allclose(written.to(expected.dtype), expected, rtol=0, atol=0, equal_nan=True):
            problem = problem or f"{file} has other numbers for {name} than the model"
    return problem


def compared(parameters: Mapping[str, Layout], step: int, *, ways: int, most: int = MOST_ELEMENTS) -> list[str]:
    """Choose the parameters that this save compares: all of a small model, and changing ones of a large model."""
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
