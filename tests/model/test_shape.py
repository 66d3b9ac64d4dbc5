"""The shapes that planner, checkpoints and formats read are those of the model that is built."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from megatron_style.config.model import ModelConfig
from megatron_style.model.shape import bands, count_parameters, parameters
from megatron_style.model.shortformer import Shortformer
from megatron_style.model.vocabulary import AdaptiveVocabulary
from megatron_style.parallel.sharding import layouts_of
from megatron_style.parallel.split import Shape
from megatron_style.parallel.topology import Axis

VOCAB_SIZE = 211
VOCABULARIES: tuple[dict[str, Any], ...] = (
    {"kind": "tied"},
    {"kind": "untied"},
    {"kind": "adaptive", "cutoffs": [40], "factor": 4},
    {"kind": "adaptive", "cutoffs": [40, 100], "factor": 2},
    {"kind": "adaptive", "cutoffs": [1, 2, 210], "factor": 3},
)


def config_of(vocabulary: dict[str, Any], positions: str) -> ModelConfig:
    sizes = {"layers": 2, "hidden_size": 48, "heads": 12, "ffn_size": 120}
    return ModelConfig.parse({**sizes, "vocabulary": vocabulary, "positions": positions}, source="model")


def kinds() -> list[Any]:
    every = product(VOCABULARIES, ("added", "infused"))
    return [pytest.param(config_of(*kind), id=f"{kind[0]} {kind[1]}") for kind in every]


@pytest.mark.parametrize("config", kinds())
def test_names_shapes_and_split_dims_are_the_models_in_its_order(config: ModelConfig) -> None:
    with torch.device("meta"):
        layouts = layouts_of(Shortformer(config, VOCAB_SIZE))
    built = {name: Shape(layout.shape, layout.shard_dim, layout.is_table) for name, layout in layouts.items()}
    assert list(parameters(config, VOCAB_SIZE).items()) == list(built.items())


@pytest.mark.parametrize("ways", [1, 3, 4])
@pytest.mark.parametrize("config", kinds())
def test_a_rank_holds_as_many_parameters_as_are_counted(config: ModelConfig, ways: int) -> None:
    for rank in range(ways):  # the last ones are padded
        with torch.device("meta"):
            model = Shortformer(config, VOCAB_SIZE, Axis(size=ways, rank=rank))
        assert count_parameters(config, VOCAB_SIZE, ways=ways) == sum(param.numel() for param in model.parameters())


@pytest.mark.parametrize("config", kinds())
def test_bands_hold_every_token_once_and_are_those_of_the_model(config: ModelConfig) -> None:
    found = bands(config, VOCAB_SIZE)
    assert [token for band in found for token in range(band.first, band.last)] == list(range(VOCAB_SIZE))
    with torch.device("meta"):
        vocabulary = Shortformer(config, VOCAB_SIZE).vocabulary
    if isinstance(vocabulary, AdaptiveVocabulary):
        built = [(band.first, band.last, band.table.weight.shape[1]) for band in vocabulary.bands]
        assert [(band.first, band.last, band.width) for band in found] == built
    else:
        assert [band.width for band in found] == [config.hidden_size]
