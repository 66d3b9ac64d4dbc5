"""`evaluate` and `generate` with neighbours compute what plain loops over all keys compute, on any number of ranks."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import megatron_style.engine.session  # noqa: F401  once, before ranks are forked
from megatron_style.datastore.retrieval import ContinuousCache, TextMixture
from megatron_style.evaluate import main as evaluate
from megatron_style.generate import main as generate
from megatron_style.parallel.local_ranks import run_ranks
from megatron_style.parallel.topology import Axis
from tests.support.array_memory import peak_of_arrays
from tests.support.datastores import (
    TRAIN,
    Array,
    build,
    measure,
    stored_keys,
    tokens_of,
    walk,
    write_model_and_texts,
    write_tokens,
)
from tests.support.models import model_config
from tests.support.tiny import (
    L,
    content,
    expect_refusal,
    run_here,
    tiny_config,
    tiny_dictionary,
    tiny_model,
    write_tiny_model,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, texts and a datastore, which no test changes."""
    folder = tmp_path_factory.mktemp("folder")
    write_model_and_texts(folder)
    tiny_dictionary().save(folder)
    assert build(folder).code == 0
    return folder


def dense_mixture(folder: Path, k: int, temperature: float, weight: float) -> Array:
    """Return the log-probabilities [tokens, vocabulary] of the mixture, by plain loops in float64."""
    queries, model = walk(folder, "valid", torch.float64)
    keys = stored_keys(folder / "store").reshape(TRAIN, -1).astype(np.float64)
    values = tokens_of(folder, "train")
    mixed = np.exp(model) * (1 - weight)
    for row, query in enumerate(queries):
        distances = ((keys - query) ** 2).sum(1)
        nearest = np.lexsort((np.arange(TRAIN), distances))[:k]
        weights = np.exp(-(distances[nearest] - distances.min()) / temperature)
        np.add.at(mixed[row], values[nearest], weight * weights / weights.sum())
    return np.log(mixed)


@pytest.mark.parametrize(("k", "temperature", "weight"), [(1, 1.0, 0.25), (16, 3.0, 0.5), (TRAIN, 1.0, 0.25)])
def test_the_mixture_is_that_of_plain_loops(folder: Path, k: int, temperature: float, weight: float) -> None:
    flags = ("--neighbours", folder / "store", "--k", k, "--temperature", temperature, "--lambda", weight)
    facts, nll, mixture_nll = measure(folder, *flags)
    tokens = tokens_of(folder, "valid")
    places = range(len(tokens))
    _, model = walk(folder, "valid", torch.float64)
    np.testing.assert_allclose(nll, -model[places, tokens], atol=1e-12)
    np.testing.assert_allclose(mixture_nll, -dense_mixture(folder, k, temperature, weight)[places, tokens], atol=1e-12)
    assert facts["perplexity"] == pytest.approx(np.exp(nll.mean()))
    assert facts["mixture_loss_nats"] == pytest.approx(mixture_nll.mean())
    assert facts["mixture_perplexity"] == pytest.approx(np.exp(mixture_nll.mean()))


def test_a_weight_of_zero_is_the_model_and_of_one_the_neighbours(folder: Path) -> None:
    common = ("--neighbours", folder / "store", "--k", 4, "--lambda")
    _, nll, mixture_nll = measure(folder, *common, 0)
    np.testing.assert_array_equal(mixture_nll, nll)
    facts, _, mixture_nll = measure(folder, *common, 1)
    assert not np.isnan(mixture_nll).any()
    assert np.isinf(mixture_nll).any()
    assert (facts["mixture_loss_nats"], facts["mixture_perplexity"]) == (None, None)
    assert facts["loss_nats"] == pytest.approx(nll.mean())


def test_a_continuous_cache_is_that_of_plain_loops(folder: Path) -> None:
    size, theta, weight = 7, 0.2, 0.3
    keys, model = walk(folder, "valid", torch.float64)
    tokens = tokens_of(folder, "valid")
    expected = []
    for place, token in enumerate(tokens):
        recent = range(max(0, place - size), place)
        scores = np.exp(theta * keys[recent] @ keys[place])
        seen = scores[tokens[recent] == token].sum() / scores.sum() if place else None
        p = np.exp(model[place, token])
        expected.append(-np.log(p if seen is None else (1 - weight) * p + weight * seen))
    flags = ("--continuous-cache", size, "--continuous-theta", theta, "--continuous-lambda", weight)
    facts, _, mixture_nll = measure(folder, *flags)
    np.testing.assert_allclose(mixture_nll, expected, atol=1e-12)
    assert facts["mixture_loss_nats"] == pytest.approx(np.mean(expected))


def test_neighbours_and_a_continuous_cache_are_mixed_in_this_order(folder: Path) -> None:
    neighbours = ("--neighbours", folder / "store", "--k", 9)
    continuous = ("--continuous-cache", 5, "--continuous-lambda", 0.2)
    model, with_neighbours = (np.exp(-nll) for nll in measure(folder, *neighbours)[1:])
    recent = (np.exp(-measure(folder, *continuous)[2]) - 0.8 * model) / 0.2
    both = np.exp(-measure(folder, *neighbours, *continuous)[2])
    np.testing.assert_allclose(both[1:], (0.8 * with_neighbours + 0.2 * recent)[1:], atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mode", [("cached", "--lanes", 3), ("nonoverlapping", "--batch-rows", 2), ("token-by-token", "--lanes", 2)], ids=str
)
def test_any_number_of_ranks_computes_the_same_bits(folder: Path, tmp_path: Path, mode: tuple[object, ...]) -> None:
    flags = ("--neighbours", folder / "store", "--k", 10, "--continuous-cache", 8, "--mode", *mode, "--json")
    found = []
    for world in (1, 2, 3):
        words = (folder / "model", "--data", folder / "valid", *flags, "--nll", tmp_path / f"{world}.npz")
        assert [done.code for done in run_ranks(world, run_here, evaluate, *words)] == [0] * world
        with np.load(tmp_path / f"{world}.npz") as held:
            found.append(held["mixture_nll"])
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[0], found[2])


def test_token_by_token_gives_the_same_as_segment_by_segment(folder: Path) -> None:
    flags = ("--neighbours", folder / "store", "--k", 10)
    np.testing.assert_allclose(measure(folder, *flags)[2], measure(folder, *flags, mode="token-by-token")[2], atol=1e-9)


def test_ranks_of_a_tensor_axis_compute_the_same_but_for_rounding(folder: Path) -> None:
    flags = ("--neighbours", folder / "store", "--k", 10, "--mode", "cached", "--json")
    words = (folder / "model", "--data", folder / "valid", *flags)
    two = json.loads(run_ranks(2, run_here, evaluate, *words, "--tensor", 2)[0].out)
    one = json.loads(run_here(evaluate, *words).out)
    assert two["mixture_loss_nats"] == pytest.approx(one["mixture_loss_nats"], rel=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_other_precisions_come_close(folder: Path, dtype: str) -> None:
    flags = ("--neighbours", folder / "store", "--k", 16)
    words = (folder / "model", "--data", folder / "valid", "--mode", "cached", "--json", *flags)
    rough = json.loads(run_here(evaluate, *words, "--dtype", dtype).out)
    exact = measure(folder, *flags)[0]
    assert rough["mixture_loss_nats"] == pytest.approx(exact["mixture_loss_nats"], rel=0.02)


@pytest.mark.slow
def test_memory_does_not_grow_with_the_text() -> None:
    """Only the losses do, which are there without a mixture, too."""
    model = tiny_model(tiny_config(), torch.float32)
    growth = []
    for tokens in (4_000, 40_000):
        mixture = TextMixture(np.zeros(tokens, np.uint16), model, None, ContinuousCache(10, 1.0, 0.5))
        for first in range(0, tokens, 1000):
            mixture.keep(first, torch.zeros(1000, 16))
        nll = np.ones(tokens)
        with peak_of_arrays() as peak:
            mixture.mixed(nll, Axis(), lambda _: None)
            growth.append(peak() - 3 * nll.nbytes)
    assert growth[1] < 1.2 * growth[0]


# Generating


def text(folder: Path, *flags: object) -> str:
    done = run_here(generate, folder / "model", "--prompt", "w1 w2 w3", "--tokens", 4 * L, "--json", *flags)
    assert done.code == 0, done
    written: str = json.loads(done.out)["text"]
    return written


CHOICES: dict[str, tuple[object, ...]] = {
    "sampling": (),
    "greedy": ("--temperature", 0),
    "temperature": ("--temperature", 0.7),
    "top k": ("--top-k", 5),
    "top p": ("--top-p", 0.8),
    "beams": ("--beams", 3),
}


@pytest.mark.parametrize(
    ("name", "choice"),
    [
        *(pytest.param("shortformer", choice, id=f"shortformer-{kind}") for kind, choice in CHOICES.items()),
        *(
            pytest.param(name, choice, id=f"{name}-{kind}", marks=() if kind == "beams" else pytest.mark.sweep)
            for name in ("baseline", "shortformer-tied")
            for kind, choice in CHOICES.items()
        ),
    ],
)
def test_a_weight_of_zero_writes_what_the_model_writes(tmp_path: Path, name: str, choice: tuple[object, ...]) -> None:
    write_model_and_texts(tmp_path, model_config(name))
    assert build(tmp_path).code == 0
    neighbours = ("--neighbours", tmp_path / "store", "--k", 12)
    alone = text(tmp_path, *choice)
    assert text(tmp_path, *choice, *neighbours, "--lambda", 0) == alone
    assert text(tmp_path, *choice, *neighbours, "--lambda", 1) != alone


@pytest.mark.parametrize("weight", [0.3, 1.0])
def test_greedy_text_is_the_likeliest_of_the_mixture(tmp_path: Path, weight: float) -> None:
    """Each written token is the likeliest of the dense mixture after the text before it."""
    write_model_and_texts(tmp_path)
    assert build(tmp_path, "--dtype", "float32").code == 0
    dictionary = tiny_dictionary()
    flags = ("--temperature", 0, "--neighbours", tmp_path / "store", "--k", TRAIN, "--lambda", weight)
    written = dictionary.encode(text(tmp_path, *flags))
    assert len(set(written)) > 1
    prompt = dictionary.encode("w1 w2 w3")
    with_prompt = np.array([*prompt, *written])
    write_tokens(tmp_path / "valid", with_prompt)
    queries, model = walk(tmp_path, "valid", torch.float32)
    keys = stored_keys(tmp_path / "store", "<f4").reshape(TRAIN, -1).astype(np.float64)
    mixed = np.exp(model) * (1 - weight)
    for row, query in enumerate(queries):
        scores = -((keys - query) ** 2).sum(1)
        weights = np.exp(scores - scores.max())
        np.add.at(mixed[row], tokens_of(tmp_path, "train"), weight * weights / weights.sum())
    np.testing.assert_array_equal(mixed.argmax(1)[len(prompt) :], written)


def test_a_conversation_uses_neighbours(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = {}
    for weight in (0, 1):
        monkeypatch.setattr("sys.stdin", io.StringIO("w1 w2\nw3\n"))
        flags = ("--neighbours", folder / "store", "--k", 4, "--lambda", weight, "--tokens", 9)
        done = run_here(generate, folder / "model", "--interactive", *flags)
        assert done.code == 0, done
        said[weight] = done.out
    assert said[0] != said[1]


# What is refused

BAD: dict[str, tuple[list[object], str]] = {
    "no datastore": (
        ["--neighbours", "{dir}/nowhere"],
        "nowhere: no datastore (with manifest.json) there; `neighbours",
    ),
    "a model as a datastore": (["--neighbours", "{dir}/model"], "model: no datastore (with manifest.json) there"),
    "more neighbours than keys": (["--k", TRAIN + 1], f"--k 91: {{dir}}/store has only {TRAIN} keys"),
    "the default, too": ([], f"--k 1024: {{dir}}/store has only {TRAIN} keys"),
    "no neighbours": (["--k", 0], "--k: '0' is not a whole number of at least 1"),
    "a negative probability": (["--lambda", -0.1], "--lambda is -0.1; it must be a probability from 0 to 1"),
    "a large probability": (["--lambda", 1.1], "--lambda is 1.1; it must be a probability from 0 to 1"),
    "no probability": (["--lambda", "nan"], "--lambda is nan; it must be a probability from 0 to 1"),
    "a temperature of zero": (["--neighbour-temperature", 0], "--neighbour-temperature is 0.0; it must be above 0"),
    "an infinite temperature": (["--neighbour-temperature", "inf"], "--neighbour-temperature is inf; it must be"),
    "lists of no index": (["--probe", 3, "--k", 3], "index.faiss: no such file; `neighbours index"),
}


def refused(folder: Path, flags: list[object], message: str) -> None:
    given = [str(flag).format(dir=folder) for flag in flags]
    neighbours = [] if "--neighbours" in given else ["--neighbours", folder / "store"]
    before = content(folder)
    for main, words in (
        (evaluate, ("--data", folder / "valid", "--mode", "cached")),
        (generate, ("--prompt", "w1")),
    ):
        expect_refusal(run_here(main, folder / "model", *words, *neighbours, *given), message.format(dir=folder))
    assert content(folder) == before


@pytest.mark.parametrize(("flags", "message"), BAD.values(), ids=BAD.keys())
def test_a_bad_flag_is_named_in_one_line(folder: Path, flags: list[object], message: str) -> None:
    refused(folder, flags, message)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--k", 3], "--k needs --neighbours DIR"),
        (["--lambda", 0.5], "--lambda needs --neighbours DIR"),
        (["--temperature", 2], "--neighbour-temperature needs --neighbours DIR"),
        (["--probe", 2], "--probe needs --neighbours DIR"),
        (["--continuous-theta", 1], "--continuous-theta needs --continuous-cache N"),
        (["--continuous-lambda", 1], "--continuous-lambda needs --continuous-cache N"),
        (["--continuous-cache", 3, "--continuous-lambda", 2], "--continuous-lambda is 2.0; it must be a probability"),
        (["--continuous-cache", 3, "--continuous-theta", -1], "--continuous-theta is -1.0; it must be 0 or more"),
    ],
)
def test_a_flag_that_nothing_uses_is_refused(folder: Path, flags: list[object], message: str) -> None:
    words = ("--data", folder / "valid", "--mode", "cached")
    expect_refusal(run_here(evaluate, folder / "model", *words, *flags), message)


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A folder that a test may change."""
    write_model_and_texts(tmp_path)
    assert build(tmp_path).code == 0
    return tmp_path


def test_the_datastore_of_another_model_is_refused(own: Path) -> None:
    config = tiny_config()
    write_tiny_model(own / "model", config.model_copy(update={"vocab_size": 50}), tiny_dictionary(50))
    refused(own, ["--k", 3], "store: has a vocabulary of 37, the model one of 50; build a datastore with this model")
    write_tiny_model(own / "model", tiny_config(layers=3))
    refused(own, ["--k", 3], "store: was built with another model; build a datastore with this one")


@pytest.mark.parametrize("name", ["keys.bin", "values.bin"])
def test_truncated_and_missing_files_are_refused(own: Path, name: str) -> None:
    path = own / "store" / name
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    refused(own, ["--k", 3], f"{name}: has {len(data) - 1} bytes, manifest.json says {len(data)}")
    path.unlink()
    refused(own, ["--k", 3], f"{name}: no such file; the datastore is not complete, build it again")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "int8"}, "manifest.json: dtype is"),
        ({"count": "many"}, "manifest.json: count is"),
        ({"count": 10**12}, "keys.bin: has"),
        ({"format_version": 2}, "manifest.json: format_version is 2"),
        ({"odd": 1}, "manifest.json: odd: unknown key"),
        ({"walk": None}, "manifest.json: walk is null"),
    ],
)
def test_a_strangers_manifest_is_refused(own: Path, change: dict[str, Any], message: str) -> None:
    path = own / "store/manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    refused(own, ["--k", 3], message)


def test_values_outside_the_vocabulary_are_refused(own: Path) -> None:
    np.full(TRAIN, 37, "<i4").tofile(own / "store/values.bin")
    refused(own, ["--k", 3], "values.bin: holds ids outside the vocabulary of 37")


@pytest.mark.parametrize("odd", [np.nan, np.inf])
def test_keys_that_are_not_numbers_are_refused_by_every_rank(own: Path, odd: float) -> None:
    keys = stored_keys(own / "store")
    keys[1000] = odd
    keys.tofile(own / "store/keys.bin")
    message = "store: holds keys that are not finite; build it again"
    refused(own, ["--k", 3], message)
    flags = ("--mode", "cached", "--neighbours", own / "store", "--k", 3)
    first, second = run_ranks(2, run_here, evaluate, own / "model", "--data", own / "valid", *flags)
    assert (first.code, second.code) == (2, 2)
    assert message in first.err
