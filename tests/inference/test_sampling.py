"""Text is continued with the context that training gave, and chosen as the sampler says."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from megatron_style.base.errors import RunFailed
from megatron_style.config.model import ModelFolderConfig
from megatron_style.data.tokenizer import BpeTokenizer, Tokenizer
from megatron_style.inference.beams import Hypothesis, beam_search
from megatron_style.inference.next_token import NextToken, Tail, next_tokens
from megatron_style.inference.sampling import Continuation, Sampler, generate, generator_of
from megatron_style.inference.scoring import Protocol, score
from megatron_style.model.shortformer import Shortformer
from megatron_style.model.vocabulary import AdaptiveVocabulary
from megatron_style.parallel.sharding import initialise
from megatron_style.parallel.topology import Axis
from tests.support.tiny import VOCAB_SIZE, tiny_config, tiny_dictionary, tiny_model

EOS = 2
GREEDY = Sampler(temperature=0)
KINDS = ["adaptive", "tied", "untied"]
PROMPTS = [[], [7], [5, 9, 30], [5, 9, 30, 11], [5, 9, 30, 11, 4, 36, 20, 19, 8, 3]]


def continuations(
    model: Shortformer,
    prompts: Sequence[Sequence[int]],
    sampler: Sampler = GREEDY,
    tokens: int = 30,
    *,
    L: int = 4,
    C: int = 4,
    seed: int = 1,
    first: int = 0,
) -> list[list[int]]:
    stream = generate(model, prompts, sampler, segment_length=L, cache_length=C, eos=EOS, seed=seed, first=first)
    return [list(row) for row in zip(*islice(stream, tokens), strict=True)]


def continuation(
    model: Shortformer,
    prompt: Sequence[int],
    sampler: Sampler = GREEDY,
    tokens: int = 30,
    *,
    L: int = 4,
    C: int = 4,
    seed: int = 1,
) -> list[int]:
    return continuations(model, [prompt], sampler, tokens, L=L, C=C, seed=seed)[0]


def model_of_seed(config: ModelFolderConfig, seed: int, scale: float = 2.0) -> Shortformer:
    """With larger weights than a training begins with, which would repeat the last token for ever."""
    model = tiny_model(config)
    initialise(model, seed, Axis())
    with torch.no_grad():
        for param in model.blocks.parameters():
            param.mul_(scale)
    return model


@torch.no_grad()
def recomputed(model: Shortformer, text: Sequence[int], L: int, C: int) -> Tensor:
    """The distribution behind a text, all caches made anew from its beginning."""
    cache = model.empty_memory(1, C)
    inputs = [EOS, *text]
    for start in range(0, len(inputs), L):
        features, cache = model.features(torch.tensor([inputs[start : start + L]]), cache)
    log_probs: Tensor = model.vocabulary.log_probs(features[:, -1])[0]
    return log_probs


def recomputed_text(
    model: Shortformer, prompt: Sequence[int], tokens: int, L: int, C: int, sampler: Sampler = GREEDY
) -> list[int]:
    text, generator = list(prompt), generator_of(1, 0)
    for _ in range(tokens):
        u = torch.rand((), dtype=torch.float64, generator=generator).item()
        text.append(sampler.choose(NextToken(recomputed(model, text, L, C)), u))
    return text[len(prompt) :]


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize(("L", "C"), [(4, 4), (4, 0), (4, 2), (4, 6), (1, 1)])
def test_greedy_text_is_what_recomputing_everything_gives(prompt: list[int], L: int, C: int) -> None:
    model = tiny_model(tiny_config())
    assert continuation(model, prompt, tokens=18, L=L, C=C) == recomputed_text(model, prompt, 18, L, C)


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("settings", [{}, {"positions": "added"}, {"positions": "added", "cache": False}], ids=str)
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


def test_text_goes_on_through_many_segments() -> None:
    tokens = continuation(tiny_model(tiny_config()), [5], Sampler(), tokens=150)
    assert len(tokens) == 150
    assert set(tokens) <= set(range(VOCAB_SIZE))
    assert len(set(tokens)) > 10


@pytest.mark.parametrize("positions", ["infused", "added"])
def test_a_model_that_predicts_no_numbers_is_told(positions: str) -> None:
    model = tiny_model(tiny_config(positions=positions))
    with torch.no_grad():
        next(iter(model.blocks.parameters())).fill_(math.nan)
    with pytest.raises(RunFailed, match="not numbers"):
        continuation(model, [5])


# The choice alone

P = torch.tensor([0.05, 0.4, 0.15, 0.3, 0.1], dtype=torch.float64)


def banded(probs: Tensor, *edges: int) -> NextToken:
    """The distribution with its tokens behind the edges in tail bands."""

    def tail(first: int, last: int) -> Tail:
        mass = probs[first:last].sum()
        return Tail(first, mass.log().item(), lambda: (probs[first:last] / mass).log())

    return NextToken(probs[: edges[0]].log(), [tail(*edge) for edge in itertools.pairwise([*edges, len(probs)])])


def spread(sampler: Sampler, probs: Tensor, *edges: int, numbers: int = 1500) -> Tensor:
    """How much of the numbers from 0 to 1 leads to each token: its probability, up to 2 / numbers."""
    following = banded(probs, *edges)
    chosen = [sampler.choose(following, (i + 0.5) / numbers) for i in range(numbers)]
    return torch.bincount(torch.tensor(chosen), minlength=len(probs)) / numbers


@pytest.mark.parametrize("edges", [[5], [2], [1, 3], [3, 4]], ids=str)
@pytest.mark.parametrize(
    ("sampler", "expected"),
    [
        (Sampler(), P),
        (Sampler(temperature=0), torch.tensor([0, 1, 0, 0, 0])),
        (Sampler(temperature=0.5), P**2 / (P**2).sum()),
        (Sampler(top_k=2), torch.tensor([0, 4 / 7, 0, 3 / 7, 0])),
        (Sampler(top_k=99), P),
        (Sampler(temperature=0.5, top_k=2), torch.tensor([0, 16 / 25, 0, 9 / 25, 0])),
        (Sampler(top_p=0.71), torch.tensor([0, 0.4, 0.15, 0.3, 0]) / 0.85),
        (Sampler(top_p=0.69), torch.tensor([0, 4 / 7, 0, 3 / 7, 0])),
        (Sampler(top_p=1.0), P),
        (Sampler(temperature=0.5, top_p=0.8), torch.tensor([0, 16 / 25, 0, 9 / 25, 0])),
        (Sampler(top_k=3, top_p=0.5), torch.tensor([0, 4 / 7, 0, 3 / 7, 0])),
    ],
    ids=str,
)
def test_tokens_are_drawn_as_often_as_the_cut_distribution_says(
    sampler: Sampler, expected: Tensor, edges: list[int]
) -> None:
    frequency = spread(sampler, P, *edges)
    assert torch.equal(frequency > 0, expected > 0)
    torch.testing.assert_close(frequency.double(), expected.double(), atol=2e-3, rtol=0)


@pytest.mark.parametrize("u", [0.0, 0.5, 1 - 2**-53, 1.0])
@pytest.mark.parametrize("edges", [[5], [3], [1, 3]], ids=str)
def test_what_is_impossible_is_never_drawn(u: float, edges: list[int]) -> None:
    probs = torch.tensor([0, 0.3, 0, 0.7, 0], dtype=torch.float32)
    for sampler in (Sampler(), Sampler(0.5), Sampler(top_k=4), Sampler(top_p=0.99)):
        assert sampler.choose(banded(probs, *edges), u) in (1, 3)


# Bands that stay closed


def features(rows: int, seed: int = 0, size: float = 1.0) -> Tensor:
    return torch.randn(rows, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * size


@pytest.fixture
def vocabulary() -> Iterator[AdaptiveVocabulary]:
    """Band sizes 10, 10 and 17. Large vectors, so that the distributions differ in shape."""
    found = tiny_model(tiny_config()).vocabulary
    assert isinstance(found, AdaptiveVocabulary)
    with torch.no_grad():
        found.clusters.mul_(3)
        yield found


@pytest.mark.parametrize("size", [0.5, 3.0, 12.0])
@pytest.mark.parametrize("count", [1, 2, 5, 12, 37, 50])
def test_the_likeliest_are_those_of_the_whole_distribution(
    vocabulary: AdaptiveVocabulary, count: int, size: float
) -> None:
    x_ND = features(40, size=size)
    for following, whole in zip(next_tokens(vocabulary, x_ND), vocabulary.log_probs(x_ND), strict=True):
        expected, order = whole.sort(descending=True, stable=True)
        log_probs, ids = following.likeliest(count)
        assert ids.tolist() == order[:count].tolist()
        torch.testing.assert_close(log_probs, expected[:count])
        assert GREEDY.choose(following, 0.5) == order[0]


@pytest.mark.parametrize("mass", [0.1, 0.5, 0.9, 0.999, 1.0])
def test_the_nucleus_is_the_likeliest_tokens_that_hold_its_mass(vocabulary: AdaptiveVocabulary, mass: float) -> None:
    x_ND = features(40, size=4.0)
    for following, whole in zip(next_tokens(vocabulary, x_ND), vocabulary.log_probs(x_ND), strict=True):
        log_probs, ids = following.nucleus(mass)
        assert set(ids.tolist()) == set(whole.topk(len(ids)).indices.tolist())
        torch.testing.assert_close(log_probs, whole[ids])
        assert log_probs.exp().sum() >= mass - 1e-12


def test_equal_tokens_come_in_the_order_of_their_ids() -> None:
    probs = torch.full((8,), 1 / 8, dtype=torch.float64)
    for edges in ([8], [7], [1, 7], [1, 2]):  # a band of one token is as likely as the token
        assert banded(probs, *edges).likeliest(2)[1].tolist() == [0, 1]


@pytest.mark.parametrize("sampler", [Sampler(), Sampler(top_k=6), Sampler(top_p=0.8), Sampler(1.7)], ids=str)
def test_the_hierarchy_draws_from_the_distribution_that_the_loss_knows(
    vocabulary: AdaptiveVocabulary, sampler: Sampler
) -> None:
    x_ND, numbers = features(1, seed=3, size=4.0), 1500
    (following,) = next_tokens(vocabulary, x_ND)
    nll = vocabulary.nll(x_ND.expand(VOCAB_SIZE, -1), torch.arange(VOCAB_SIZE), None)
    counts = Counter(sampler.choose(following, (i + 0.5) / numbers) for i in range(numbers))
    found = torch.tensor([counts[i] / numbers for i in range(VOCAB_SIZE)])
    expected = spread(sampler, (-nll).exp(), VOCAB_SIZE, numbers=numbers)
    torch.testing.assert_close(found, expected, atol=2 / numbers, rtol=0)
    if sampler == Sampler():
        torch.testing.assert_close(found.double(), (-nll).exp(), atol=2 / numbers, rtol=0)


def opened(vocabulary: AdaptiveVocabulary, x_ND: Tensor, sampler: Sampler, u: float = 0.5) -> list[list[int]]:
    """Which tail bands are computed when each row chooses."""
    calls: list[int] = []
    inside = AdaptiveVocabulary.tail_log_probs

    def counted(self: AdaptiveVocabulary, tail: int, x: Tensor) -> Tensor:
        calls.append(tail + 1)
        return inside(self, tail, x)

    found = []
    with patch.object(AdaptiveVocabulary, "tail_log_probs", counted):
        for following in next_tokens(vocabulary, x_ND):
            calls.clear()
            sampler.choose(following, u)
            found.append(sorted(calls))
    return found


@pytest.mark.parametrize("count", [1, 3])
def test_a_band_is_opened_only_when_it_could_hold_one_of_the_likeliest(
    vocabulary: AdaptiveVocabulary, count: int
) -> None:
    """Compared with what is known from band 0 and the likelier bands."""
    x_ND = features(200, size=3.0)
    whole, clusters = vocabulary.log_probs(x_ND), vocabulary.head_log_probs(x_ND)[1]
    bands = opened(vocabulary, x_ND, Sampler(top_k=count))
    for row, (first, second) in enumerate(clusters.tolist()):
        parts = whole[row].split([10, 10, 17])
        known = {1: parts[0] if first >= second else torch.cat([parts[0], parts[2]])}
        known[2] = parts[0] if second > first else torch.cat([parts[0], parts[1]])
        could = [band for band, bound in ((1, first), (2, second)) if bound >= known[band].topk(count).values[-1]]
        assert bands[row] == could
    assert Counter(map(tuple, bands)).keys() == {(), (1,), (2,), (1, 2)}


def test_a_drawn_token_opens_at_most_its_own_band(vocabulary: AdaptiveVocabulary) -> None:
    x_ND = features(50, size=1.0)
    for u in (0.1, 0.5, 0.9):
        tokens = [Sampler().choose(following, u) for following in next_tokens(vocabulary, x_ND)]
        bands = [[] if token < 10 else [1] if token < 20 else [2] for token in tokens]
        assert opened(vocabulary, x_ND, Sampler(), u) == bands
        assert Counter(map(tuple, bands)).keys() == {(), (1,), (2,)}


def test_a_small_nucleus_opens_little_and_a_temperature_opens_all(vocabulary: AdaptiveVocabulary) -> None:
    x_ND = features(50, size=6.0)
    small, large = (opened(vocabulary, x_ND, Sampler(top_p=p)) for p in (0.2, 1.0))
    assert sum(map(len, small)) < sum(map(len, large))
    assert opened(vocabulary, x_ND, Sampler(temperature=0.7)) == [[1, 2]] * 50


@pytest.mark.parametrize("kind", KINDS)
def test_the_distribution_sums_to_one_and_agrees_with_the_loss(kind: str) -> None:
    model, x_ND = tiny_model(tiny_config(kind)), features(5)
    with torch.no_grad():
        log_probs = model.vocabulary.log_probs(x_ND)
        everything = torch.arange(VOCAB_SIZE).repeat(5)
        nll = model.vocabulary.nll(x_ND.repeat_interleave(VOCAB_SIZE, 0), everything, None)
        following = next_tokens(model.vocabulary, x_ND)
    torch.testing.assert_close(log_probs.exp().sum(-1), torch.ones(5, dtype=torch.float64))
    torch.testing.assert_close(log_probs, -nll.view(5, VOCAB_SIZE))
    for token, whole in zip(following, log_probs, strict=True):
        found, ids = token.everything()
        torch.testing.assert_close(found, whole)
        assert ids.tolist() == list(range(VOCAB_SIZE))


# Beam search

BEST_IS_NOT_GREEDY = [("infused", 10), ("infused", 18), ("infused", 26), ("added", 5), ("added", 6), ("added", 33)]


def searched(
    model: Shortformer,
    prompt: Sequence[int],
    beams: int,
    tokens: int,
    ends: Sequence[int] = (),
    *,
    L: int = 4,
    C: int = 4,
) -> Hypothesis:
    progress = beam_search(
        model,
        prompt,
        beams=beams,
        tokens=tokens,
        segment_length=L,
        cache_length=C,
        eos=EOS,
        ended=lambda text: text[-1] in ends,
    )
    return list(progress)[-1]


def log_prob(model: Shortformer, prompt: Sequence[int], text: Sequence[int]) -> float:
    whole = [*prompt, *text]
    nll = score(model, torch.tensor(whole).numpy(), Protocol("cached", 4, 4), eos=EOS).nll
    return float(-nll[len(prompt) :].sum())


@pytest.mark.parametrize("positions", ["infused", "added"])
def test_one_beam_is_greedy(positions: str) -> None:
    model = model_of_seed(tiny_config(positions=positions), 1)
    for prompt in PROMPTS:
        assert list(searched(model, prompt, 1, 25).tokens) == continuation(model, prompt, tokens=25)


@pytest.mark.parametrize(("positions", "seed"), BEST_IS_NOT_GREEDY)
@pytest.mark.parametrize("ends", [(), (0,), (1, 3)], ids=str)
def test_with_enough_beams_the_best_of_all_texts_is_found(positions: str, seed: int, ends: tuple[int, ...]) -> None:
    """In models where greedy choices do not find it."""
    config = tiny_config("untied", positions=positions).model_copy(update={"vocab_size": 5})
    model, prompt = model_of_seed(config, seed, scale=1.5), [4, 3, 1]
    texts = set()
    for text in itertools.product(range(5), repeat=3):
        length = next((n for n, token in enumerate(text, 1) if token in ends), 3)
        texts.add(text[:length])
    means = {text: log_prob(model, prompt, text) / len(text) for text in texts}
    best = max(means, key=lambda text: means[text])
    found = searched(model, prompt, 25, 3, ends)
    assert found.tokens == best
    assert found.score == pytest.approx(means[best], abs=1e-9)
    assert list(best) != continuation(model, prompt, tokens=3)


@pytest.mark.parametrize("beams", [2, 3, 7])
def test_what_the_search_says_of_its_text_is_what_evaluation_says(beams: int) -> None:
    model, prompt = model_of_seed(tiny_config("untied"), 4), [5, 9, 30]
    found = searched(model, prompt, beams, 30)
    assert found.log_prob == pytest.approx(log_prob(model, prompt, found.tokens), abs=1e-8)
    assert found == searched(model, prompt, beams, 30)
    greedy = continuation(model, prompt, tokens=30)
    assert found.log_prob > log_prob(model, prompt, greedy)
    assert len(found.tokens) == 30


def test_more_beams_than_tokens_and_a_text_that_ends_at_once() -> None:
    model = tiny_model(tiny_config())
    assert len(searched(model, [5], 50, 3).tokens) == 3
    assert len(searched(model, [5], 3, 20, range(VOCAB_SIZE)).tokens) == 1


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


def test_a_character_is_shown_when_it_is_whole() -> None:
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
