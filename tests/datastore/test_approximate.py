"""An index only proposes rows: their distances are exact, and what it does not find has no weight."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch

import megatron_style.engine.session  # noqa: F401  once, before ranks are forked
from megatron_style.config.model import ModelFolderConfig
from megatron_style.data.store import open_store
from megatron_style.datastore.approximate import ApproximateSearch
from megatron_style.datastore.search import Neighbours, nearest
from megatron_style.datastore.store import open_datastore
from megatron_style.evaluate import main as evaluate
from megatron_style.model.shortformer import Shortformer
from megatron_style.neighbours import main as neighbours
from megatron_style.parallel.local_ranks import run_ranks
from megatron_style.parallel.topology import Axis, Topology
from megatron_style.prepare import main as prepare
from tests.support.datastores import build, measure, tokens_of, write_texts, write_tokens
from tests.support.tiny import (
    content,
    expect_refusal,
    run_here,
    tiny_config,
    tiny_model,
    weights_of,
    write_model,
    write_tiny_model,
)

faiss = pytest.importorskip("faiss", reason="approximate search needs faiss-cpu")
TRAIN = 600


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, texts, a datastore and its index, which no test changes."""
    folder = tmp_path_factory.mktemp("folder")
    make(folder)
    return folder


def make(folder: Path) -> None:
    write_tiny_model(folder / "model")
    write_texts(folder, TRAIN)
    assert build(folder).code == 0
    done = run_here(neighbours, "index", folder / "store", "--lists", 10, "--json")
    assert done.code == 0, done
    facts = json.loads(done.out)
    assert (facts["lists"], facts["code_bytes"]) == (10, 16)
    assert facts["bytes"] == (folder / "store/index.faiss").stat().st_size


def queries_of(folder: Path) -> torch.Tensor:
    keys = open_datastore(folder / "store").keys[:70].astype(np.float32)
    return torch.from_numpy(keys + np.random.default_rng(3).normal(size=keys.shape).astype(np.float32))


def found(folder: Path, probe: int, k: int, *, ranks: bool = False) -> Neighbours:
    axis = Topology.of_world(tensor=1).data if ranks else Axis()
    search = ApproximateSearch.open(open_datastore(folder / "store"), probe)
    return search.nearest(queries_of(folder), k, axis)


def test_distances_are_exact_and_sorted(folder: Path) -> None:
    keys = open_datastore(folder / "store").keys
    queries = queries_of(folder)
    some = found(folder, probe=2, k=9)
    every = nearest(keys, queries, len(keys))
    for row in range(len(queries)):
        exact = dict(zip(every.rows_Qk[row].tolist(), every.distances_Qk[row].tolist(), strict=True))
        pairs = list(zip(some.distances_Qk[row].tolist(), some.rows_Qk[row].tolist(), strict=True))
        assert [distance for distance, _ in pairs] == [exact[index] for _, index in pairs]
        assert pairs == sorted(pairs)


def test_all_lists_together_hold_all_keys(folder: Path) -> None:
    keys = open_datastore(folder / "store").keys
    expected = nearest(keys, queries_of(folder), TRAIN)
    everything = found(folder, probe=1000, k=TRAIN)
    assert torch.equal(everything.rows_Qk, expected.rows_Qk)
    assert torch.equal(everything.distances_Qk, expected.distances_Qk)


def test_what_is_not_found_has_no_weight(folder: Path) -> None:
    some = found(folder, probe=1, k=TRAIN)
    missing = some.rows_Qk < 0
    assert missing.any()
    assert not missing.all(1).any()
    assert torch.equal(missing, some.distances_Qk.isinf())
    assert torch.equal(missing.long().sort().values, missing.long()), "those that were found come first"
    flags = ("--neighbours", folder / "store", "--k", TRAIN, "--probe", 1)
    _, nll, mixture_nll = measure(folder, *flags)
    assert np.isfinite(mixture_nll).all()
    assert (mixture_nll != nll).all()


def test_an_empty_list_leaves_the_model_alone(folder: Path) -> None:
    flags = ("--neighbours", folder / "store", "--k", 5, "--probe", 1, "--lambda", 1)
    nothing = torch.full((1000, 5), -1)
    with patch.object(ApproximateSearch, "_rows", lambda _, queries, __: nothing[: len(queries)]):
        _, nll, mixture_nll = measure(folder, *flags)
    np.testing.assert_array_equal(mixture_nll, nll)


def test_any_number_of_ranks_finds_the_same(folder: Path) -> None:
    alone = found(folder, probe=3, k=20)
    for world in (2, 3):
        for other in run_ranks(world, lambda: found(folder, probe=3, k=20, ranks=True)):
            assert torch.equal(other.rows_Qk, alone.rows_Qk)
            assert torch.equal(other.distances_Qk, alone.distances_Qk)


def test_an_index_has_the_same_bytes_each_time(folder: Path, tmp_path: Path) -> None:
    make(tmp_path)
    assert content(tmp_path / "store") == content(folder / "store")


# What is refused


def refused(folder: Path, message: str) -> None:
    words = ("--data", folder / "valid", "--mode", "cached", "--neighbours", folder / "store", "--k", 5, "--probe", 2)
    expect_refusal(run_here(evaluate, folder / "model", *words), message)


@pytest.fixture
def own(tmp_path: Path) -> Path:
    make(tmp_path)
    return tmp_path


def test_without_faiss_it_is_named(folder: Path) -> None:
    with patch.dict(sys.modules, {"faiss": None}):
        refused(folder, "--probe: needs the library faiss; install it with `pip install faiss-cpu`")
        expect_refusal(run_here(neighbours, "index", folder / "store"), "neighbours index: needs the library faiss")


@pytest.mark.parametrize("length", [0, 3, 500, -1])
def test_a_truncated_index_is_refused(own: Path, length: int) -> None:
    path = own / "store/index.faiss"
    path.write_bytes(path.read_bytes()[:length])
    refused(own, "index.faiss: not a complete index of faiss: ")


def test_the_index_of_other_keys_is_refused(own: Path) -> None:
    for kind in (faiss.IndexFlatL2(16), faiss.IndexIVFFlat(faiss.IndexFlatL2(16), 16, 2)):
        faiss.write_index(kind, str(own / "store/index.faiss"))
        refused(own, "index.faiss: is not an index of these keys; make it again with `neighbours index`")


def test_rows_that_do_not_exist_are_refused(own: Path) -> None:
    path = str(own / "store/index.faiss")
    index = faiss.read_index(path)
    index.reset()
    keys = open_datastore(own / "store").keys.astype(np.float32)
    index.add_with_ids(keys, np.arange(TRAIN) + 1_000_000)
    faiss.write_index(index, path)
    refused(own, "index.faiss: names rows that do not exist; make it again")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--code-bytes", 3], "--code-bytes 3: must divide the 16 numbers of a key"),
        (["--lists", 601], "--lists 601: {dir}/store has only 600 keys"),
    ],
)
def test_a_shape_that_does_not_fit_is_refused(folder: Path, flags: list[object], message: str) -> None:
    expect_refusal(run_here(neighbours, "index", folder / "store", *flags), message.format(dir=folder))


def test_a_small_datastore_needs_no_index(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "model")
    write_texts(tmp_path, 200)
    assert build(tmp_path).code == 0
    message = "has 200 keys, an index needs 256; exact search is fast enough"
    expect_refusal(run_here(neighbours, "index", tmp_path / "store"), message)


# What it costs


def trained(config: ModelFolderConfig, tokens: torch.Tensor, steps: int) -> Shortformer:
    model = tiny_model(config, torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    rows = tokens[: len(tokens) // 65 * 65].view(-1, 65)
    for step in range(steps):
        batch = rows[torch.randint(len(rows), (16,), generator=torch.Generator().manual_seed(step))]
        model(batch[:, :-1], batch[:, 1:], model.empty_memory(16, 64)).nll.mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.mark.sweep
def test_on_real_text_approximate_search_costs_half_a_percent_at_most(tmp_path: Path) -> None:
    words = ("--tokenizer", "words", "--vocab-size", 2000)
    assert run_here(prepare, "--corpus", "sotu", "--output", tmp_path / "sotu", *words).code == 0
    for name, tokens in (("train", 25_000), ("valid", 600)):
        write_tokens(tmp_path / name, open_store(tmp_path / "sotu" / name).tokens[:tokens], vocab_size=2000)
    sizes = {"hidden_size": 64, "heads": 4, "ffn_size": 128, "vocabulary": {"kind": "adaptive", "cutoffs": [500]}}
    lengths = {"segment_length": 64, "cache_length": 64}
    data = tiny_config().as_data() | {"model": {"layers": 2, **sizes}, "vocab_size": 2000, **lengths}
    config = ModelFolderConfig.parse(data, source="small model")
    model = trained(config, torch.from_numpy(tokens_of(tmp_path, "train")), steps=60)
    write_model(tmp_path / "model", config, weights_of(model).__getitem__, None)
    assert build(tmp_path).code == 0
    assert run_here(neighbours, "index", tmp_path / "store", "--code-bytes", 16).code == 0
    flags = ("--neighbours", tmp_path / "store")
    exact, _, _ = measure(tmp_path, *flags)
    approximate, _, _ = measure(tmp_path, *flags, "--probe", 16)
    assert exact["mixture_perplexity"] < 0.95 * exact["perplexity"]
    assert approximate["mixture_perplexity"] == pytest.approx(exact["mixture_perplexity"], rel=0.005)
    assert approximate["mixture_perplexity"] != exact["mixture_perplexity"]
