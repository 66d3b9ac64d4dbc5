"""A continuation by plain forward passes equals the decoder's greedy one, on any number of tensor-parallel ranks."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_style.config.model import ModelFolderConfig
from megatron_style.config.run import OutputConfig
from megatron_style.data.corpus import Corpus
from megatron_style.inference.greedy import continue_greedily
from megatron_style.inference.held_out import held_out
from megatron_style.inference.sampling import Sampler, generate
from megatron_style.inference.scoring.protocol import Protocol
from megatron_style.inference.scoring.score import Score, score
from megatron_style.model.shortformer import Shortformer
from megatron_style.parallel.local_ranks import run_ranks
from megatron_style.parallel.sharding import initialise
from megatron_style.parallel.topology import Axis, Topology
from megatron_style.schedule.stages import Stage
from tests.support.tiny import VOCAB_SIZE, tiny_config, tiny_dictionary, tiny_model

pytestmark = pytest.mark.slow

KINDS = ["adaptive", "tied", "untied"]
WALKS = [(50, 50), (6, 6), (5, 0), (4, 7)]
EOS, PROMPT, COUNT = 2, [5, 17, 30, 9, 21, 3, 3], 25


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("positions", ["infused", "added"])
@pytest.mark.parametrize(("L", "C"), WALKS)
def test_it_is_what_generating_greedily_gives(kind: str, positions: str, L: int, C: int) -> None:
    model = tiny_model(tiny_config(kind, positions=positions))
    greedy = Sampler(temperature=0)
    tokens = generate(model, [PROMPT], greedy, segment_length=L, cache_length=C, eos=EOS, seed=0)
    found = continue_greedily(model, [EOS, *PROMPT], COUNT, segment_length=L, cache_length=C)
    assert found == [token for (token,) in islice(tokens, COUNT)]


def on_tensor_ranks(config: ModelFolderConfig) -> list[int]:
    axis = Topology.of_world(tensor=dist.get_world_size()).tensor
    model = Shortformer(config.model, config.vocab_size, axis)
    initialise(model, 3, axis)
    return continue_greedily(model.double(), PROMPT, COUNT, segment_length=6, cache_length=6)


@pytest.mark.parametrize(("kind", "world"), [("adaptive", 2), ("adaptive", 4), ("tied", 2), ("untied", 2)])
def test_tensor_ranks_agree_with_one_process(kind: str, world: int) -> None:
    """The middle band has five tokens: a rank of four holds none of them."""
    uneven = {"vocabulary": {"kind": "adaptive", "cutoffs": [13, 18], "factor": 2}} if kind == "adaptive" else {}
    config = tiny_config(kind, **uneven)
    alone = continue_greedily(tiny_model(config), PROMPT, COUNT, segment_length=6, cache_length=6)
    assert run_ranks(world, on_tensor_ranks, config) == [alone] * world


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_that_diverged_still_gives_tokens(kind: str) -> None:
    model = tiny_model(tiny_config(kind))
    with torch.no_grad():
        next(iter(model.blocks.parameters())).fill_(float("nan"))
    assert all(
        0 <= token < VOCAB_SIZE for token in continue_greedily(model, PROMPT, 3, segment_length=6, cache_length=6)
    )


def test_nothing_is_drawn() -> None:
    model, before = tiny_model(tiny_config()), torch.get_rng_state()
    continue_greedily(model, PROMPT, 5, segment_length=6, cache_length=6)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(("L", "tokens"), [(32, 320), (16, 100), (20, 111), (5, 3), (1000, 40)])
def test_bands_of_a_segment_hold_every_token_once(L: int, tokens: int) -> None:
    """Weighted by the tokens in them, they give the loss; a place's loss here is its number."""
    protocol = Protocol("cached", L, L)
    places = protocol.places(tokens)
    bands = Score(places.astype(float)).by_band(protocol)
    assert len(bands) == min(16, L, tokens)
    assert bands == sorted(bands)
    if tokens % L == 0 and L % 16 == 0:
        width = L // 16
        assert bands == [width * band + (width - 1) / 2 for band in range(16)]


@pytest.mark.parametrize("words", [VOCAB_SIZE, 10, None])
def test_the_sample_of_a_validation_is_spelled(words: int | None) -> None:
    """Ids beyond the dictionary are unknown words; without one they are numbers."""
    model, tokens = tiny_model(tiny_config()), np.array([*PROMPT, *range(4, 30)])
    tokenizer = tiny_dictionary(words) if words else None
    valid = SimpleNamespace(tokens=tokens)
    digest = "of the text"
    plain = SimpleNamespace(
        valid={"": valid}, main_valid="", tokenizer=tokenizer, eos=EOS, held_out_digest=lambda _: digest
    )
    corpus = cast(Corpus, plain)
    output = OutputConfig(path=Path("run"), sample_tokens=7)
    stage = Stage(0, segment_length=6, cache_length=6, rows=1, micro_rows=1)
    found = held_out(model, corpus, "", output, stage, Axis())
    prompt = tokens[:16].tolist()
    written = continue_greedily(model, [EOS, *prompt], 7, segment_length=6, cache_length=6)
    for text, ids in ((found.prompt, prompt), (found.text, written)):
        spelled = [str(i) if words is None else "<unk>" if i >= words else tokenizer.decode([i]) for i in ids]
        assert text.replace("\n", " ").split() == " ".join(spelled).split()
    assert found.loss == score(model, tokens, Protocol("cached", 6, 6), eos=EOS).loss
