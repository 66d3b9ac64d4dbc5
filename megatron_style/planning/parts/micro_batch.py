"""What the costs of a part are computed for, and units that all parts share."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_style.config.model import ModelConfig
from megatron_style.planning.setup import Setup
from megatron_style.schedule.stages import Stage

PASSES = 3  # for each product of forward, backward computes two: the gradients of the input and of the weight
FLOAT = 4  # bytes
LONG = 8  # bytes


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch on one rank."""

    setup: Setup
    stage: Stage

    @property
    def model(self) -> ModelConfig:
        return self.setup.model

    @property
    def element_bytes(self) -> int:
        return self.setup.sharding.element_bytes

    @property
    def tokens(self) -> int:
        return self.stage.micro_rows * self.stage.segment_length

    @property
    def keys(self) -> int:
        """Return the number of tokens attended to: the memory's and the segment's."""
        return self.stage.micro_rows * (self.stage.segment_length + self.remembered)

    @property
    def slots(self) -> int:
        """Return the compressed slots of the memory."""
        return 0 if self.model.memory is None else self.model.memory.compressed

    @property
    def remembered(self) -> int:
        """Return the length of the memory: its cached tokens and its compressed slots."""
        return self.stage.cache_length + self.slots

    @property
    def vector_bytes(self) -> int:
        return self.model.hidden_size * self.element_bytes

    @property
    def stream(self) -> int:
        """Return the bytes of the vectors between two blocks."""
        return self.tokens * self.vector_bytes

    def mask_bytes(self, masked: int) -> int:
        """Return the bytes per element of a mask that torch's own dropout keeps."""
        return 1 if self.setup.kernels.byte_masks else masked


@dataclass(frozen=True)
class Sent:
    """The partial sums that a rank reduces over the tensor axis in one micro-batch."""

    messages: int
    vectors: int  # of the hidden size
    other: float = 0.0  # bytes of everything else
