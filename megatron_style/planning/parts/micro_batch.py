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
    def is_split(self) -> bool:
        """True if vectors between layers are split over the tensor-parallel ranks, by position."""
        return self.setup.sequence and self.setup.tensor > 1

    @property
    def recalls(self) -> bool:
        """True if what is gathered from other ranks is gathered again in the backward pass, and not kept."""
        return self.setup.tensor > 1 and not self.setup.recompute

    @property
    def own_tokens(self) -> float:
        """Return the number of tokens whose vectors a rank has between layers: all, or its share."""
        return self.tokens / self.setup.tensor if self.is_split else self.tokens

    @property
    def cached(self) -> int:
        """Return the number of tokens and slots in the memory of all rows."""
        return self.stage.micro_rows * self.remembered

    @property
    def keys(self) -> int:
        """Return the number of tokens attended to: the memory's and the segment's."""
        return self.tokens + self.cached

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
    def stream(self) -> float:
        """Return the bytes of the vectors between two blocks."""
        return self.own_tokens * self.vector_bytes

    @property
    def plain_mask_bytes(self) -> int:
        """Return the bytes per element of the mask that torch's plain attention keeps."""
        return 1 if self.setup.kernels.byte_masks else FLOAT


@dataclass(frozen=True)
class Sent:
    """The messages of a rank over the tensor axis in one micro-batch."""

    messages: int = 0
    vectors: int = 0  # of the hidden size, of which partial sums are reduced
    moved: int = 0  # of the hidden size, which are gathered, or reduced and scattered: half of a reduction
    other: float = 0.0  # bytes of everything else that is reduced

    def plus(self, more: Sent) -> Sent:
        return Sent(
            self.messages + more.messages,
            self.vectors + more.vectors,
            self.moved + more.moved,
            self.other + more.other,
        )
