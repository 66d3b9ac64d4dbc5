"""What is trained, on what grid, and with what kernels: all that a plan is made of beside a stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from megatron_style.config.model import ModelConfig
from megatron_style.model.shape import BandShape, bands, parameters
from megatron_style.planning.sharding import Sharding

_FLOAT = 4  # bytes


@dataclass(frozen=True)
class Kernels:
    """What torch's kernels keep; the defaults are those of GPUs."""

    fused_attention: bool = True  # never holds the matrix of tokens x tokens; CPUs have it only without dropout
    byte_masks: bool = True  # torch's own dropout keeps a byte an element; on CPUs as much as the element has
    bytes_kept_per_score: int = _FLOAT  # logits are in full precision, whatever the weights are in
    bytes_needed_per_score: int = 0  # beside: their gradient is made in the same memory


ON_GPU = Kernels()


@dataclass(frozen=True)
class Setup:
    """The sizes of the grid are `tensor` and `data`."""

    model: ModelConfig
    vocab_size: int
    band_shares: Sequence[float]  # of the tokens, in each band of the vocabulary
    sharding: Sharding
    tensor: int = 1
    data: int = 1
    recompute: bool = False
    kernels: Kernels = ON_GPU

    @cached_property  # a search over micro-batches reads it often
    def parameter_sizes(self) -> tuple[int, ...]:
        """Return the elements of each parameter on a tensor-parallel rank."""
        shapes = parameters(self.model, self.vocab_size).values()
        return tuple(shape.elements(self.tensor) for shape in shapes)

    @property
    def parameters(self) -> int:
        return sum(self.parameter_sizes)

    @property
    def bands(self) -> tuple[BandShape, ...]:
        return bands(self.model, self.vocab_size)
