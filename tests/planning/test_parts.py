"""Every kind that a run file can name has costs of its own; sums over parts are tested in the other modules."""

from __future__ import annotations

from itertools import product
from typing import get_args

import pytest

from megatron_style.config.model import CompressionConfig, ModelConfig, VocabularyConfig
from megatron_style.planning.parts.model import parts_of
from megatron_style.planning.setup import Setup, Sharding
from megatron_style.planning.text import zipf_shares
from megatron_style.schedule.stages import Stage

VOCABULARIES = get_args(VocabularyConfig.model_fields["kind"].annotation)
FUNCTIONS = get_args(CompressionConfig.model_fields["function"].annotation)
POSITIONS = get_args(ModelConfig.model_fields["positions"].annotation)


@pytest.mark.parametrize(
    ("positions", "function"), [*product(POSITIONS, [None]), *product(["infused", "relative"], FUNCTIONS)]
)
@pytest.mark.parametrize("kind", VOCABULARIES)
def test_every_kind_of_model_has_costs(kind: str, positions: str, function: str | None) -> None:
    vocabulary = {"kind": kind, "cutoffs": [40, 100] if kind == "adaptive" else []}
    sizes = {"layers": 2, "hidden_size": 48, "heads": 12, "ffn_size": 120}
    memory = {"compressed": 8, "rate": 4, "function": function} if function else None
    settings = {**sizes, "vocabulary": vocabulary, "positions": positions, "memory": memory}
    model = ModelConfig.parse(settings, source="model")
    setup = Setup(model, 200, zipf_shares(model, 200), Sharding(), tensor=2)
    parts = parts_of(setup, Stage(0, segment_length=16, cache_length=16, rows=4, micro_rows=2))
    for part in (parts.attention, parts.feed_forward, parts.vocabulary):
        assert part.kept > 0
        assert part.sent.messages > 0
    assert 0 < parts.products(causal_once=True) < parts.products(causal_once=False)
