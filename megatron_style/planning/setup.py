"""The setup of a run: model, grid, sharding and kernels. Together with a stage it determines an estimate."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from megatron_style.base.errors import UserError
from megatron_style.config.model import ModelConfig
from megatron_style.config.run import CachePlace, RunConfig
from megatron_style.model.shape import BandShape, bands, buffers, parameters
from megatron_style.planning.text import TextFacts

Precision = Literal["fp32", "bf16", "fp16"]
_STATES = {"nag": 1, "adamw": 2}  # full-precision numbers that an optimizer keeps per parameter
_SIZE_KEYS = {
    "bucket": "reduce_bucket_size",
    "most_gathered": "stage3_max_live_parameters",
    "kept_whole": "stage3_param_persistence_threshold",
    "group": "sub_group_size",
}
_DEEPSPEED_STATES = {"adam": 2, "adamw": 2, "lion": 1, "sgd": 1, "nadam": 2, "radam": 2, "rmsprop": 1}
_FLOAT = 4  # bytes


@dataclass(frozen=True)
class Sharding:
    """DeepSpeed's settings of precision and sharding, with its defaults. Sizes are numbers of elements."""

    zero_stage: int = 0
    precision: Precision = "fp32"
    optimizer_states: int = 1
    bucket: int = 500_000_000  # gradients are reduced through a buffer of this size
    overlaps: bool = False  # what overlap_comm asks for; `reduces_in_backward` is what happens
    full_gradients: bool = False  # in half precision: gradients of micro-batches are accumulated in float32
    most_gathered: int = 1_000_000_000  # ZeRO 3: weights that are gathered at the same time
    kept_whole: int = 100_000  # ZeRO 3: the size up to which a parameter is never sharded
    group: int = 1_000_000_000  # ZeRO 3: parameters that are updated at the same time
    offloads_optimizer: bool = False
    offloads_weights: bool = False

    @property
    def element_bytes(self) -> int:
        return 4 if self.precision == "fp32" else 2

    @property
    def gradient_bytes(self) -> int:
        """Return the bytes per element of the gradients that are accumulated over micro-batches."""
        return 4 if self.full_gradients else self.element_bytes

    @property
    def keeps_two_gradients(self) -> bool:
        """True if DeepSpeed uses its bf16 optimizer instead of ZeRO's. In addition to the gradients of a micro-batch it
        keeps complete ones in float32, and reduces these after the last backward pass, whatever overlap_comm says."""
        is_bf16_optimizer = self.zero_stage == 1 and self.precision == "bf16" and not self.offloads_optimizer
        return is_bf16_optimizer and self.full_gradients

    @property
    def reduces_in_backward(self) -> bool:
        """True if gradients are reduced while the backward pass runs, at ZeRO 1 and 2 through a second buffer."""
        return self.overlaps and self.zero_stage > 0 and not self.keeps_two_gradients


@dataclass(frozen=True)
class Kernels:
    """What torch's kernels keep; the defaults are those of GPUs."""

    fused_attention: bool = True  # never holds the matrix of tokens x tokens
    byte_masks: bool = True  # of torch's plain attention; on CPUs, four bytes per element
    bytes_kept_per_score: int | None = None  # of the logits; None: they are as precise as the weights
    widened_scores: int = 2**24  # half-precision logits that the loss computes with in full precision at once
    bytes_needed_per_score: int = 0  # extra bytes at the peak; 0, because the gradient reuses the logits' memory


ON_GPU = Kernels()


@dataclass(frozen=True)
class Setup:
    """A model on a grid of `data` x `tensor` ranks."""

    model: ModelConfig
    vocab_size: int
    band_shares: Sequence[float]  # of the tokens, in each band of the vocabulary
    sharding: Sharding
    tensor: int = 1
    data: int = 1
    recompute: bool = False
    kernels: Kernels = ON_GPU
    sequence: bool = False  # what lies between layers is split over the tensor-parallel ranks, by position
    cache: CachePlace = "device"

    @cached_property  # a search over micro-batches reads it often
    def parameter_sizes(self) -> tuple[int, ...]:
        """Return the elements of each parameter on a tensor-parallel rank."""
        shapes = parameters(self.model, self.vocab_size).values()
        return tuple(shape.elements(self.tensor) for shape in shapes)

    @property
    def parameters(self) -> int:
        return sum(self.parameter_sizes)

    @property
    def centroid_bytes(self) -> int:
        """Return the bytes of the centroids and their counts on a tensor-parallel rank, always in full precision."""
        return _FLOAT * sum(shape.elements(self.tensor) for shape in buffers(self.model).values())

    @property
    def bands(self) -> tuple[BandShape, ...]:
        return bands(self.model, self.vocab_size)


def setup_of(run: RunConfig, text: TextFacts, sharding: Sharding, *, gpus: int) -> Setup:
    tensor = run.parallel.tensor
    return Setup(
        model=run.model.with_vocabulary(text.vocab_size),
        vocab_size=text.vocab_size,
        band_shares=text.band_shares,
        sharding=sharding,
        tensor=tensor,
        data=gpus // tensor,
        recompute=run.parallel.recompute,
        sequence=run.parallel.sequence,
        cache=run.parallel.cache,
    )


def sharding_of(run: RunConfig, user: dict[str, Any]) -> Sharding:
    """Return the settings of the run's ds_config, whose content is `user`."""
    source = str(run.deepspeed)
    section = _section(user, "zero_optimization", source)
    stage = section.get("stage", 0)
    if type(stage) is not int or stage not in range(4):
        raise UserError(f"{source}: zero_optimization.stage is {json.dumps(stage)}; 0, 1, 2 or 3 is expected")
    sizes = {name: _elements(section, key, source) for name, key in _SIZE_KEYS.items() if section.get(key) is not None}
    return Sharding(
        zero_stage=stage,
        precision=_precision(user, source),
        optimizer_states=_optimizer_states(run, user),
        overlaps=stage == 3 if section.get("overlap_comm") is None else bool(section["overlap_comm"]),
        full_gradients=_section(user, "data_types", source).get("grad_accum_dtype") == "fp32",
        offloads_optimizer=_offloads(section, "offload_optimizer", source),
        offloads_weights=_offloads(section, "offload_param", source),
        **sizes,
    )


def _elements(section: dict[str, Any], key: str, source: str) -> int:
    value = section[key]
    if not isinstance(value, int | float) or value < 0:
        raise UserError(f"{source}: zero_optimization.{key} is {json.dumps(value)}; a number of at least 0 is expected")
    return int(value)


def _section(holder: dict[str, Any], key: str, source: str) -> dict[str, Any]:
    section = holder.get(key, {})
    if not isinstance(section, dict):
        raise UserError(f"{source}: {key} is {json.dumps(section)}; it must be an object, such as {{...}}")
    return section


def _precision(user: dict[str, Any], source: str) -> Precision:
    for name in ("fp16", "bf16"):
        if _section(user, name, source).get("enabled"):
            return "fp16" if name == "fp16" else "bf16"
    return "fp32"


def _optimizer_states(run: RunConfig, user: dict[str, Any]) -> int:
    if "optimizer" not in user:
        return _STATES[run.optimizer.kind]
    kind = _section(user, "optimizer", str(run.deepspeed)).get("type")
    if str(kind).lower() not in _DEEPSPEED_STATES:
        known = ", ".join(_DEEPSPEED_STATES)
        raise UserError(f"{run.deepspeed}: optimizer.type is {json.dumps(kind)}; plan knows {known}")
    return _DEEPSPEED_STATES[str(kind).lower()]


def _offloads(section: dict[str, Any], key: str, source: str) -> bool:
    return bool(_section(section, key, source).get("device", "none") != "none")
