"""The proof of a save: the written files, read by their map, must hold what the engine computes with."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import xxhash
from torch import Tensor

from megatron_style.engine.state import EngineState
from megatron_style.parallel.randomness import derive_key
from megatron_style.parallel.sharding import Fragment, Layout

MOST_ELEMENTS = 2**28  # of a tensor rank's shards that one save compares; a larger model is sampled, in turns
_BRIEF = 64  # a save in the background compares this fraction of the elements
_NAN = 0.123456789  # stands for every NaN, of which devices have different ones


class Fingerprint(NamedTuple):
    """The digest of some weights, so that a file can be compared with them when they have changed."""

    dtype: torch.dtype
    digest: str


def take_fingerprints(
    state: EngineState, fragments: Sequence[Fragment], names: Iterable[str]
) -> dict[str, Fingerprint]:
    """Return the fingerprints of this rank's fragments of these parameters, which are the same on all ranks, because
    ZeRO 3 gathers each from all of them."""
    held = {fragment.param: fragment for fragment in fragments}  # a rank has at most one of each parameter
    found = {}
    for name in names:
        fragment = held.get(name, Fragment(name, 0, 0, 0, 0))  # of a small model, some ranks may hold padding only
        working = state.working_weight(name, fragment.offset, fragment.count)
        if name in held:
            found[name] = Fingerprint(working.dtype, _digest(working))
    return found


def difference(
    flat: Sequence[Mapping[str, Any]],
    fragments: Sequence[Fragment],
    expected: Mapping[str, Fingerprint],
    file: str,
) -> str | None:
    """Describe where the flat tensors of this rank's file contradict the model, if anywhere. Each rank reads back its
    own file only, and together they see all."""
    for fragment in fragments:
        if fragment.param not in expected:
            continue
        dtype, digest = expected[fragment.param]
        written = flat[fragment.group]["weight"].view(-1)[fragment.start : fragment.start + fragment.count]
        if _digest(written.to(dtype, copy=True)) != digest:
            return f"{file} has other numbers for {fragment.param} than the model"
    return None


def _digest(weights: Tensor) -> str:
    """Return the digest of the numbers; the tensor is changed in place."""
    comparable = weights.nan_to_num_(_NAN, math.inf, -math.inf).cpu()
    return xxhash.xxh3_128(comparable.view(torch.uint8).numpy().data).hexdigest()


def compared(
    parameters: Mapping[str, Layout], step: int, *, ways: int, briefly: bool = False, most: int = MOST_ELEMENTS
) -> list[str]:
    """Choose the parameters that this save compares: all of a small model, and changing ones of a large model. With
    `briefly` a fraction only, because training waits for it."""
    names = list(parameters)
    if briefly:
        total = sum(math.prod(layout.shard_shape(ways)) for layout in parameters.values())
        most = min(most, total // _BRIEF)
    first = derive_key("proof", step) % len(names)
    chosen: list[str] = []
    elements = 0
    for name in names[first:] + names[:first]:
        elements += math.prod(parameters[name].shard_shape(ways))
        if chosen and elements > most:
            break
        chosen.append(name)
    return chosen
