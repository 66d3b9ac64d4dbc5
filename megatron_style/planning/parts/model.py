"""The parts of one model, by its configuration. A kind of attention or vocabulary is a row in a table here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatron_style.planning.parts.attention import Attention, InfusedAttention, RelativeAttention
from megatron_style.planning.parts.compressive import CompressiveInfusedAttention, CompressiveRelativeAttention
from megatron_style.planning.parts.feed_forward import FeedForward
from megatron_style.planning.parts.micro_batch import MicroBatch
from megatron_style.planning.parts.routed import RoutedAttention
from megatron_style.planning.parts.vocabulary import AdaptiveVocabulary, Vocabulary
from megatron_style.planning.setup import Setup
from megatron_style.schedule.stages import Stage

_ATTENTIONS: Mapping[str, type[Attention]] = {
    "added": Attention,
    "infused": InfusedAttention,
    "relative": RelativeAttention,
}
_COMPRESSIVE_ATTENTIONS: Mapping[str, type[Attention]] = {
    "infused": CompressiveInfusedAttention,
    "relative": CompressiveRelativeAttention,
}
_VOCABULARIES: Mapping[str, type[Vocabulary]] = {
    "adaptive": AdaptiveVocabulary,
    "tied": Vocabulary,
    "untied": Vocabulary,
}


@dataclass(frozen=True)
class Parts:
    """The two halves of one of `layers` equal blocks, and the vocabulary."""

    layers: int
    attention: Attention
    feed_forward: FeedForward
    vocabulary: Vocabulary

    def products(self, *, causal_once: bool) -> float:
        block = self.attention.products(causal_once=causal_once) + self.feed_forward.products()
        return self.layers * block + self.vocabulary.products()


def parts_of(setup: Setup, stage: Stage) -> Parts:
    batch = MicroBatch(setup, stage)
    attentions = _ATTENTIONS if setup.model.memory is None else _COMPRESSIVE_ATTENTIONS
    return Parts(
        layers=setup.model.layers,
        attention=RoutedAttention(batch) if setup.model.routing else attentions[setup.model.positions](batch),
        feed_forward=FeedForward(batch),
        vocabulary=_VOCABULARIES[setup.model.vocabulary.kind](batch),
    )
