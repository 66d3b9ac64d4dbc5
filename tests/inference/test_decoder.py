"""Every row of a decoder gets what the model computes for its text alone, segment by segment."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_style.inference import decoder as decoder_module
from megatron_style.inference.decoder import Decoder
from megatron_style.model.shortformer import Shortformer
from megatron_style.parallel.local_ranks import run_ranks
from megatron_style.parallel.sharding import initialise
from megatron_style.parallel.topology import Axis, Topology
from tests.support.models import model_config
from tests.support.tiny import VOCAB_SIZE, tiny_config, tiny_model

SEEDS = [1, pytest.param(2, marks=pytest.mark.sweep), pytest.param(3, marks=pytest.mark.sweep)]
WALKS = [(4, 4), (4, 0), (4, 2), (4, 7), (1, 1), (5, 3)]


def seeded_model(seed: int, kind: str = "adaptive") -> Shortformer:
    model = tiny_model(tiny_config(kind))
    initialise(model, seed, Axis())
    return model


def texts_of(lengths: list[int], seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]


@torch.no_grad()
def walked(model: Shortformer, text: list[int], L: int, C: int) -> Tensor:
    """The features of each token of the text, by the model itself."""
    cache, parts = model.empty_memory(1, C), []
    for segment in torch.tensor([text]).split(L, 1):
        features, cache, *_ = model.features(segment, cache)
        parts.append(features[0])
    return torch.cat(parts)


def expect_equal(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("L", "C"), WALKS)
@pytest.mark.parametrize("prompt", [0, 1, 3, 4, 5, 8, 13, 30])
def test_a_text_read_and_then_followed_is_what_the_model_gives(seed: int, L: int, C: int, prompt: int) -> None:
    model, [text] = seeded_model(seed), texts_of([prompt + 20], seed)
    expected = walked(model, text, L, C)
    decoder = Decoder(model, rows=1, segment_length=L, cache_length=C)
    if prompt:
        expect_equal(decoder.read(text[:prompt]).x, expected[prompt - 1])
    for i in range(prompt, len(text)):
        expect_equal(decoder.step(torch.tensor(text[i : i + 1])).x[0], expected[i])


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("L", "C"), WALKS)
def test_rows_of_unequal_prompts_do_not_know_of_each_other(seed: int, L: int, C: int) -> None:
    prompts, more = [1, 6, 11, 4], 25
    model, texts = seeded_model(seed), texts_of([prompt + more for prompt in prompts], seed)
    expected = [walked(model, text, L, C) for text in texts]
    decoder = Decoder(model, rows=4, segment_length=L, cache_length=C)
    for row in (2, 0, 3, 1):
        prompt = prompts[row]
        expect_equal(decoder.read(texts[row][:prompt], row=row).x, expected[row][prompt - 1])
    for i in range(more):
        ids = torch.tensor([text[prompt + i] for text, prompt in zip(texts, prompts, strict=True)])
        features = decoder.step(ids).x
        for row, prompt in enumerate(prompts):
            expect_equal(features[row], expected[row][prompt + i])


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", ["adaptive", "tied", "untied"])
def test_one_row_can_read_on_between_two_steps_of_all(seed: int, kind: str) -> None:
    model, texts = seeded_model(seed, kind), texts_of([30, 30], seed)
    expected = [walked(model, text, 4, 5) for text in texts]
    decoder, at = Decoder(model, rows=2, segment_length=4, cache_length=5), [0, 0]
    for row, read in [(0, 3), (1, 4), (1, 9), (0, 1), (0, 10)]:
        decoder.read(torch.tensor(texts[row][at[row] : at[row] + read]), row=row)
        at[row] += read
        features = decoder.step(torch.tensor([texts[0][at[0]], texts[1][at[1]]])).x
        for each in range(2):
            expect_equal(features[each], expected[each][at[each]])
            at[each] += 1


def test_rows_that_are_filled_alike_need_no_mask() -> None:
    decoder = Decoder(seeded_model(1), rows=2, segment_length=4, cache_length=4)
    for row in range(2):
        decoder.read([1, 2, 3], row=row)
    with patch.object(decoder_module, "_mixed", wraps=decoder_module._mixed) as attention:
        for token in range(6):
            decoder.step(torch.tensor([token, token]))
    masks = [call.args[3] for call in attention.call_args_list]
    assert masks == [None] * 12


def follow_choices(
    model: Shortformer, decoder: Decoder, texts: list[list[int]], choices: list[list[int]], L: int, C: int
) -> None:
    """Before each token the rows are chosen anew."""
    for i, chosen in enumerate(choices):
        decoder.select(chosen)
        new = [i, i + 11, i + 22]
        texts = [[*texts[source], token] for source, token in zip(chosen, new, strict=True)]
        for features, text in zip(decoder.step(torch.tensor(new)).x, texts, strict=True):
            expect_equal(features, walked(model, text, L, C)[-1])


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("choice", [[0, 1, 2], [2, 1, 0], [1, 1, 1], [2, 0, 1], [0, 0, 2]])
def test_a_row_continues_what_another_was(seed: int, choice: list[int]) -> None:
    model, texts = seeded_model(seed), texts_of([2, 7, 13], seed)
    decoder = Decoder(model, rows=3, segment_length=4, cache_length=5)
    for row, text in enumerate(texts):
        decoder.read(text, row=row)
    follow_choices(model, decoder, texts, [choice, [0, 1, 2], [0, 1, 2]] * 4, 4, 5)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("L", "C"), [*WALKS, (40, 40)])
def test_beams_of_one_prompt_can_be_chosen_anew_after_every_token(seed: int, L: int, C: int) -> None:
    model, [prompt] = seeded_model(seed), texts_of([6], seed)
    decoder = Decoder(model, rows=3, segment_length=L, cache_length=C)
    decoder.read(prompt, row=1)
    choices = [[1, 1, 1], [2, 0, 1], [0, 0, 2], [1, 2, 2], [2, 2, 2], [0, 0, 1], [2, 1, 0]]
    follow_choices(model, decoder, [prompt] * 3, choices * 2, L, C)


COMPRESSIVE = ["compressive", "compressive-mean", "compressive-shortformer"]


def catalogued(name: str) -> Shortformer:
    config = model_config(name)
    model = Shortformer(config.model, config.vocab_size)
    initialise(model, 1, Axis())
    return model.double()


@pytest.mark.parametrize("name", COMPRESSIVE)
@pytest.mark.parametrize("choice", [[2, 0, 1], [0, 0, 2]])
def test_compressed_memories_of_rows_are_chosen_anew(name: str, choice: list[int]) -> None:
    model, texts = catalogued(name), texts_of([2, 7, 13], 1)
    decoder = Decoder(model, rows=3, segment_length=4, cache_length=5)
    for row, text in enumerate(texts):
        decoder.read(text, row=row)
    follow_choices(model, decoder, texts, [choice, [0, 1, 2], [0, 1, 2]] * 4, 4, 5)


def expect_features(name: str, text: list[int], expected: Tensor) -> None:
    axis = Topology.of_world(tensor=dist.get_world_size()).tensor
    config = model_config(name)
    model = Shortformer(config.model, config.vocab_size, axis)
    initialise(model, 1, axis)
    decoder = Decoder(model.double(), rows=1, segment_length=4, cache_length=5)
    expect_equal(decoder.read(text[:11]).x, expected[10])
    for token, features in zip(text[11:], expected[11:], strict=True):
        expect_equal(decoder.step(torch.tensor([token])).x[0], features)


@pytest.mark.parametrize("name", ["shortformer", *COMPRESSIVE])
def test_a_model_split_over_ranks_gives_the_same(name: str) -> None:
    model, [text] = catalogued(name), texts_of([20], 1)
    run_ranks(2, expect_features, name, text, walked(model, text, 4, 5))
