"""Every token is scored once, with the context that the protocol defines, and nothing else changes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from megatron_style.base.errors import UserError
from megatron_style.inference.scoring.modes import contexts, make_protocol
from megatron_style.inference.scoring.protocol import Protocol, Request
from megatron_style.inference.scoring.score import Score, score
from megatron_style.model.shortformer import Shortformer
from megatron_style.parallel.local_ranks import run_ranks
from megatron_style.parallel.randomness import Noise
from megatron_style.parallel.sharding import initialise
from megatron_style.parallel.topology import Topology
from tests.support.textbook import score_row
from tests.support.tiny import VOCAB_SIZE, tiny_config, tiny_model, weights_of

TOKENS = np.random.default_rng(11).integers(0, VOCAB_SIZE, 40)
EOS = 2


def textbook(tokens: NDArray[np.int64], L: int, C: int) -> list[float]:
    config = tiny_config()
    weights = {name: tensor.numpy() for name, tensor in weights_of(tiny_model(config)).items()}
    return score_row(config.model, config.vocab_size, weights, tokens.tolist(), L, C, EOS)


@pytest.mark.parametrize("length", [1, 3, 4, 5, 7, 8, 9, 12, 13])
@pytest.mark.parametrize(("L", "C"), [(4, 0), (4, 4), (4, 2), (4, 7)])
def test_texts_around_complete_segments_are_scored_as_by_the_textbook(length: int, L: int, C: int) -> None:
    counts: list[int] = []
    protocol = Protocol("cached" if C else "nonoverlapping", L, C)
    result = score(tiny_model(tiny_config()), TOKENS[:length], protocol, eos=EOS, progress=counts.append)
    assert sum(counts) == len(result.nll) == length
    np.testing.assert_allclose(result.nll, textbook(TOKENS[:length], L, C), atol=1e-5)  # its sinusoids are float64


@pytest.mark.parametrize("length", [1, 4, 11, 12, 13, 23, 24, 25, 40])
@pytest.mark.parametrize("rows", [2, 3, 50])
def test_how_many_segments_go_at_once_does_not_matter(length: int, rows: int) -> None:
    model = tiny_model(tiny_config())
    one_by_one = score(model, TOKENS[:length], Protocol("nonoverlapping", 4, 0), eos=EOS)
    together = score(model, TOKENS[:length], Protocol("nonoverlapping", 4, 0, batch_rows=rows), eos=EOS)
    np.testing.assert_allclose(together.nll, one_by_one.nll, atol=1e-12)


def test_a_later_token_never_changes_an_earlier_score() -> None:
    model, changed = tiny_model(tiny_config()), TOKENS.copy()
    changed[21] = (changed[21] + 1) % VOCAB_SIZE
    for protocol in (Protocol("cached", 4, 7), Protocol("nonoverlapping", 4, 0, batch_rows=3)):
        before, after = (score(model, tokens, protocol, eos=EOS).nll for tokens in (TOKENS, changed))
        np.testing.assert_allclose(before[:21], after[:21], atol=1e-12)
        assert abs(before[21] - after[21]) > 1e-6


@pytest.mark.parametrize("C", [4, 9, 100])
def test_a_cache_longer_than_the_segment_reaches_further_back(C: int) -> None:
    nll = score(tiny_model(tiny_config()), TOKENS[:20], Protocol("cached", 4, C), eos=EOS).nll
    np.testing.assert_allclose(nll, textbook(TOKENS[:20], 4, C), atol=1e-5)


def test_segments_that_know_nothing_of_each_other_can_be_scored_alone() -> None:
    model, protocol = tiny_model(tiny_config()), Protocol("nonoverlapping", 4, 0)
    whole = score(model, TOKENS, protocol, eos=EOS).nll
    alone = score(model, TOKENS[8:12], protocol, eos=int(TOKENS[7])).nll
    np.testing.assert_allclose(whole[8:12], alone, atol=1e-12)


@pytest.mark.parametrize("protocol", [Protocol("cached", 4, 4), Protocol("nonoverlapping", 4, 0, batch_rows=3)])
def test_scoring_between_two_training_steps_changes_nothing(protocol: Protocol) -> None:
    rates = {"hidden": 0.3, "attention": 0.3, "activation": 0.3, "softmax": 0.3}
    model = tiny_model(tiny_config(dropout=rates)).train()
    ids, cache = torch.from_numpy(TOKENS[:8]).view(2, 4), model.empty_memory(2, 4)
    nll, cache, *_ = model(ids, ids, cache, Noise(1))
    nll.sum().backward()
    weights, cached = weights_of(model), [layer.clone() for layer in cache.layers]
    grads = {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}
    random_state = torch.get_rng_state()

    first = score(model, TOKENS, protocol, eos=EOS)

    assert model.training
    assert torch.is_grad_enabled()
    assert torch.equal(torch.get_rng_state(), random_state)
    assert grads
    for name, param in model.named_parameters():
        assert torch.equal(param, weights[name]), name
        assert param.grad is not None
        assert torch.equal(param.grad, grads[name]), name
    assert all(torch.equal(now, then) for now, then in zip(cache.layers, cached, strict=True))
    assert np.array_equal(score(model.eval(), TOKENS, protocol, eos=EOS).nll, first.nll)  # nothing was dropped


# Shared by ranks


SHARED = {
    "nonoverlapping": Protocol("nonoverlapping", 4, batch_rows=3),
    "sliding": Protocol("sliding", 4, stride=1, batch_rows=5),
    "one lane": Protocol("cached", 4, 4),
    "lanes": Protocol("cached", 4, 6, lanes=4),
    "lanes token by token": Protocol("token-by-token", 4, 6, lanes=4),
}


def score_share(protocol: Protocol) -> NDArray[np.float64]:
    axis = Topology.of_world(tensor=1).data
    return score(tiny_model(tiny_config()), TOKENS, protocol, eos=EOS, axis=axis).nll


@pytest.mark.parametrize(
    "protocol",
    [
        pytest.param(protocol, id=name, marks=() if name == "lanes" else pytest.mark.slow)
        for name, protocol in SHARED.items()
    ],
)
def test_the_number_of_ranks_changes_no_bit(protocol: Protocol) -> None:
    one, two, three = (run_ranks(world, score_share, protocol) for world in (1, 2, 3))
    for nll in two + three:
        assert np.array_equal(nll, one[0])


def score_split(protocol: Protocol) -> NDArray[np.float64]:
    axis, config = Topology.of_world(tensor=2).tensor, tiny_config()
    model = Shortformer(config.model, config.vocab_size, axis)
    initialise(model, 3, axis)
    return score(model.double(), TOKENS, protocol, eos=EOS).nll


@pytest.mark.parametrize("protocol", [SHARED["sliding"], SHARED["lanes"]])
def test_a_model_split_over_the_tensor_axis_scores_the_same(protocol: Protocol) -> None:
    whole = score(tiny_model(tiny_config()), TOKENS, protocol, eos=EOS).nll
    for nll in run_ranks(2, score_split, protocol):
        np.testing.assert_allclose(nll, whole, atol=1e-9)


@pytest.mark.parametrize(("cache_length", "warm"), [(2, 1), (4, 1), (6, 2), (9, 3)])
def test_a_lane_is_warmed_by_the_text_before_it(cache_length: int, warm: int) -> None:
    """As if the text had begun that many segments earlier."""
    model, protocol = tiny_model(tiny_config()), Protocol("cached", 4, cache_length)
    lanes = score(model, TOKENS, replace(protocol, lanes=2), eos=EOS).nll
    np.testing.assert_allclose(lanes[:20], score(model, TOKENS[:20], protocol, eos=EOS).nll, atol=1e-12)
    begin = 20 - warm * 4
    warmed = score(model, TOKENS[begin:], protocol, eos=int(TOKENS[begin - 1])).nll
    np.testing.assert_allclose(lanes[20:], warmed[warm * 4 :], atol=1e-12)
    assert np.abs(lanes[20:] - score(model, TOKENS, protocol, eos=EOS).nll[20:]).max() > 1e-9  # but not all of it


def test_a_lane_is_warmed_by_what_a_compressed_memory_is_made_of() -> None:
    """The 3 slots of 2 tokens and the cache of 6 are 3 segments."""
    config = tiny_config(memory={"compressed": 3, "rate": 2})
    model = tiny_model(config)
    protocol = make_protocol(Request("cached", 4, lanes=2), config, tokens=40, where="model")
    assert contexts(protocol, 40) == (6 + 6 + 1, 6 + 6 + 4)
    lanes = score(model, TOKENS, protocol, eos=EOS).nll
    warmed = score(model, TOKENS[8:], replace(protocol, lanes=1), eos=int(TOKENS[7])).nll
    np.testing.assert_allclose(lanes[20:], warmed[12:], atol=1e-12)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (Request("cached", 5), r"--segment-length \(5\) must be a multiple of model.memory.rate \(2\); use 4 or 6"),
        (
            Request("cached", same_length=True),
            "--same-length: is about distances of tokens, and model has",
        ),
    ],
)
def test_what_a_compressed_memory_cannot_do_is_refused(asked: Request, message: str) -> None:
    config = tiny_config(positions="relative", memory={"compressed": 3, "rate": 2})
    with pytest.raises(UserError, match=message):
        make_protocol(asked, config, tokens=40, where="model")


def test_lanes_token_by_token_are_the_lanes_of_cached() -> None:
    model = tiny_model(tiny_config())
    cached, stepped = (score(model, TOKENS, SHARED[name], eos=EOS).nll for name in ("lanes", "lanes token by token"))
    np.testing.assert_allclose(stepped, cached, atol=1e-12)


def test_a_hopeless_model_has_a_large_perplexity_and_no_overflow() -> None:
    assert Score(np.array([1e5])).perplexity == pytest.approx(1.0142e304, rel=1e-3)
    assert Score(np.log([2.0, 8.0])).perplexity == pytest.approx(4)
