"""Text is continued with the context lengths of training, and decoded as its tokens say."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from megatron_style.base.errors import RunFailed
from megatron_style.data.tokenizer import BpeTokenizer, Tokenizer
from megatron_style.inference.next_token import NextToken
from megatron_style.inference.sampling import Continuation, Sampler, generator_of
from megatron_style.inference.scoring.protocol import Protocol
from megatron_style.inference.scoring.score import score
from megatron_style.model.shortformer import Shortformer
from tests.support.continuing import EOS, GREEDY, KINDS, PROMPTS, continuation, continuations, model_of_seed
from tests.support.tiny import VOCAB_SIZE, tiny_config, tiny_dictionary, tiny_model

pytestmark = pytest.mark.slow


@torch.no_grad()
def recomputed(model: Shortformer, text: Sequence[int], L: int, C: int) -> Tensor:
    """The distribution behind a text, all caches made anew from its beginning."""
    cache = model.empty_memory(1, C)
    inputs = [EOS, *text]
    for start in range(0, len(inputs), L):
        features, cache, *_ = model.features(torch.tensor([inputs[start : start + L]]), cache)
    log_probs: Tensor = model.vocabulary.log_probs(features[:, -1])[0]
    return log_probs


def recomputed_text(
    model: Shortformer, prompt: Sequence[int], tokens: int, L: int, C: int, sampler: Sampler = GREEDY
) -> list[int]:
    text, generator = list(prompt), generator_of(1, 0)
    for _ in range(tokens):
        u = torch.rand((), dtype=torch.float64, generator=generator).item()
        text.append(sampler.choose(NextToken(recomputed(model, text, L, C).numpy()), u))
    return text[len(prompt) :]


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize(("L", "C"), [(4, 4), (4, 0), (4, 2), (4, 6), (1, 1)])
def test_greedy_text_is_what_recomputing_everything_gives(prompt: list[int], L: int, C: int) -> None:
    model = tiny_model(tiny_config())
    assert continuation(model, prompt, tokens=18, L=L, C=C) == recomputed_text(model, prompt, 18, L, C)


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.sweep) for seed in (2, 3))])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"positions": "added"},
        {"positions": "added", "cache": False},
        {"positions": "relative", "memory": {"compressed": 4, "rate": 2}},
    ],
    ids=str,
)
@pytest.mark.parametrize(("kind", "sampler"), [("untied", GREEDY), ("adaptive", Sampler(4.0))], ids=["greedy", "drawn"])
def test_the_same_holds_long_after_the_cache_turned_over(
    settings: dict[str, Any], kind: str, sampler: Sampler, seed: int
) -> None:
    L, C = 6, 0 if settings.get("cache") is False else 6
    model = model_of_seed(tiny_config(kind, **settings), seed)
    text = continuation(model, [5, 9, 30], sampler, tokens=(L + C) + 5 * L, L=L, C=C)
    assert text == recomputed_text(model, [5, 9, 30], len(text), L, C, sampler)
    assert len(set(text)) > 5, "a text of one token would show little"


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_text_is_scored_as_the_likeliest(kind: str) -> None:
    """Generation and evaluation walk through a text in the same way."""
    model, prompt = tiny_model(tiny_config(kind)), [5, 9, 30]
    text = prompt + continuation(model, prompt, tokens=20)
    nll = score(model, torch.tensor(text).numpy(), Protocol("cached", 4, 4), eos=EOS).nll
    for i in range(len(prompt), len(text)):
        assert nll[i] == pytest.approx(-recomputed(model, text[:i], 4, 4).max().item(), abs=1e-9)


@pytest.mark.parametrize("positions", ["infused", "added"])
@pytest.mark.parametrize("sampler", [GREEDY, Sampler(), Sampler(0.7, top_k=9, top_p=0.8)], ids=str)
def test_the_prompts_of_a_batch_do_not_know_of_each_other(positions: str, sampler: Sampler) -> None:
    """They are at different places of their segments, and each has a generator of its own."""
    model = model_of_seed(tiny_config(positions=positions), 1)
    together = continuations(model, PROMPTS, sampler)
    assert together == [continuations(model, [p], sampler, first=i)[0] for i, p in enumerate(PROMPTS)]
    assert together == continuations(model, PROMPTS[:2], sampler) + continuations(model, PROMPTS[2:], sampler, first=2)


def test_a_prompt_given_twice_is_continued_in_two_ways() -> None:
    first, second = continuations(tiny_model(tiny_config()), [[5], [5]], Sampler())
    assert first != second


def test_a_seed_repeats_and_another_seed_does_not() -> None:
    model = tiny_model(tiny_config())
    first, again, other = (continuation(model, [5], Sampler(), seed=seed) for seed in (1, 1, 2))
    assert first == again != other


def test_sampling_leaves_the_random_state_of_others_alone() -> None:
    state = torch.get_rng_state()
    continuation(tiny_model(tiny_config()), [5], Sampler())
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.is_grad_enabled()


@pytest.mark.parametrize(
    "sampler",
    [
        Sampler(top_k=1),
        Sampler(top_p=1e-9),
        Sampler(temperature=1e-4),
        Sampler(temperature=1e-320),
        Sampler(temperature=5.0, top_k=1, top_p=0.5),
    ],
    ids=str,
)
def test_the_narrowest_choice_is_greedy(sampler: Sampler) -> None:
    model = tiny_model(tiny_config())
    assert continuation(model, [5, 9], sampler) == continuation(model, [5, 9])


def test_text_continues_through_many_segments() -> None:
    tokens = continuation(tiny_model(tiny_config()), [5], Sampler(), tokens=150)
    assert len(tokens) == 150
    assert set(tokens) <= set(range(VOCAB_SIZE))
    assert len(set(tokens)) > 10


@pytest.mark.parametrize("positions", ["infused", "added"])
def test_a_model_that_predicts_no_numbers_is_refused(positions: str) -> None:
    model = tiny_model(tiny_config(positions=positions))
    with torch.no_grad():
        next(iter(model.blocks.parameters())).fill_(math.nan)
    with pytest.raises(RunFailed, match="not numbers"):
        continuation(model, [5])


# The spelling of tokens, and where a text ends


def bpe() -> BpeTokenizer:
    return BpeTokenizer.train(["größer größe € 5 日本 日本 🙂🙂 🙂"], vocab_size=280)


def pieces(text: Continuation, tokens: Sequence[int]) -> list[str]:
    found = []
    for token in tokens:
        if text.ended:
            break
        found.append(text.add(token))
    return [*found, text.finish()]


@pytest.mark.parametrize("tokenizer", [bpe(), tiny_dictionary()], ids=["bpe", "words"])
@pytest.mark.parametrize("seed", range(60))
def test_pieces_make_up_the_text_whatever_the_tokens_are(tokenizer: Tokenizer, seed: int) -> None:
    """Random bytes are mostly no characters at all."""
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, tokenizer.vocab_size, (60,), generator=draw).tolist()
    text = Continuation(tokenizer)
    assert "".join(pieces(text, tokens)) == text.text == tokenizer.decode(tokens)


def test_a_character_is_shown_when_it_is_complete() -> None:
    tokenizer = BpeTokenizer.train(["a"], vocab_size=260)  # nothing but bytes
    shown = pieces(Continuation(tokenizer), tokenizer.encode("aö€🙂b"))
    assert shown == ["a", "", "ö", "", "", "€", "", "", "", "🙂", "b", ""]


def test_a_token_is_decoded_with_the_few_before_it_however_long_the_text_is() -> None:
    tokenizer, lengths = tiny_dictionary(), []
    decode = type(tokenizer).decode

    def counted(self: Tokenizer, ids: Sequence[int]) -> str:
        lengths.append(len(ids))
        return decode(self, ids)  # type: ignore[arg-type]

    with patch.object(type(tokenizer), "decode", counted):
        pieces(Continuation(tokenizer, ["w1 w9"]), [5, 6, 7, 8, 9] * 40)
    assert max(lengths) == 5


@pytest.mark.parametrize("spelling", ["bytes", "pairs"])
@pytest.mark.parametrize(
    ("whole", "stops", "expected"),
    [
        ("größer als 5 €, oder", ["5 €"], "größer als "),
        ("größer als 5 €, oder", ["€", "als"], "größer "),
        ("größer als 5 €, oder", ["5 $", "oder."], "größer als 5 €, oder"),
        ("aaab", ["aab"], "a"),
        ("abababc", ["ababc"], "ab"),
        ("one\ntwo\n\nthree", ["\n\n"], "one\ntwo"),
        ("stop", ["stop"], ""),
    ],
)
def test_a_text_ends_before_a_stop_and_nothing_of_it_is_shown(
    whole: str, stops: list[str], expected: str, spelling: str
) -> None:
    lines = ["a"] if spelling == "bytes" else [whole] * 3
    tokenizer = BpeTokenizer.train(lines, vocab_size=260 if spelling == "bytes" else 300)
    text = Continuation(tokenizer, stops)
    shown = pieces(text, tokenizer.encode(whole))
    assert "".join(shown) == text.text == expected
    assert all(expected.startswith("".join(shown[:n])) for n in range(len(shown)))


def test_a_stop_may_span_words_and_a_line_may_be_the_end() -> None:
    tokenizer = tiny_dictionary()
    tokens = tokenizer.encode("w1 w2\nw3 w4 w5")
    for stops, line_end, expected in (
        (["w3 w4"], False, "w1 w2\n"),
        (["2\nw"], False, "w1 w"),
        ([], True, "w1 w2"),
        (["w3"], True, "w1 w2"),
        (["w2"], True, "w1 "),
    ):
        text = Continuation(tokenizer, stops, line_end=line_end)
        assert "".join(pieces(text, tokens)) == expected


def test_a_part_of_a_character_before_the_end_of_a_line_is_not_lost() -> None:
    tokenizer = BpeTokenizer.train(["a"], vocab_size=260)
    tokens = [*tokenizer.encode("a€")[:-1], EOS, *tokenizer.encode("b")]
    assert "".join(pieces(Continuation(tokenizer), tokens)) == "a\ufffd\nb"
    assert "".join(pieces(Continuation(tokenizer, line_end=True), tokens)) == "a\ufffd"
