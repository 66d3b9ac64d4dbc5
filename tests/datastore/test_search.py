"""Exact search is exact: brute force in float64 finds the same rows and the same bits, on any number of ranks."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from megatron_style.datastore import search
from megatron_style.datastore.search import Neighbours, nearest
from megatron_style.parallel.local_ranks import run_ranks
from megatron_style.parallel.topology import Topology
from tests.support.array_memory import peak_of_arrays

Keys = NDArray[Any]


def brute_force(keys: Keys, queries: torch.Tensor, k: int) -> Neighbours:
    distances = np.stack([((keys.astype(np.float64) - query) ** 2).sum(1) for query in queries.double().numpy()])
    rows = np.stack([np.lexsort((np.arange(len(keys)), row))[:k] for row in distances])
    return Neighbours(torch.from_numpy(np.take_along_axis(distances, rows, 1)), torch.from_numpy(rows))


def expect_equal(found: Neighbours, wanted: Neighbours) -> None:
    assert torch.equal(found.rows_Qk, wanted.rows_Qk)
    torch.testing.assert_close(found.distances_Qk, wanted.distances_Qk, rtol=1e-14, atol=0)


@pytest.fixture
def small_blocks() -> Any:
    with patch.object(search, "_ELEMENTS", 128) as patched:
        yield patched


def near_ties(seed: int, rows: int, size: int, dtype: str) -> tuple[Keys, torch.Tensor]:
    """Return keys of which many have the same distance, or one that differs by less than float32 can tell."""
    rng = np.random.default_rng(seed)
    centre = rng.normal(size=size) * 30
    keys = centre + rng.integers(-1, 2, (rows, size)) * rng.choice([1e-6, 1.0, 3.0], (rows, 1))
    queries = np.concatenate([keys[:3], centre[None]])
    return keys.astype(dtype), torch.from_numpy(queries.astype(np.float32))


@pytest.mark.usefixtures("small_blocks")
@given(
    st.integers(0, 10**6), st.integers(1, 60), st.integers(1, 12), st.sampled_from(["float16", "float32", "float64"])
)
def test_the_nearest_are_those_of_brute_force(seed: int, rows: int, size: int, dtype: str) -> None:
    keys, queries = near_ties(seed, rows, size, dtype)
    for k in {1, min(7, rows), rows}:
        expect_equal(nearest(keys, queries, k), brute_force(keys, queries, k))


@pytest.mark.parametrize("scale", [1e-30, 1e-22, 1e-19, 1e18, 1e25])
def test_distances_beyond_the_range_of_float32_are_still_exact(scale: float) -> None:
    keys = (np.random.default_rng(1).normal(size=(200, 8)) * scale).astype(np.float32)
    queries = torch.from_numpy(keys[:5] * np.float32(1.5))
    expect_equal(nearest(keys, queries, 9), brute_force(keys, queries, 9))


def on_a_rank(keys: Keys, queries: torch.Tensor, k: int) -> Neighbours:
    return nearest(keys, queries, k, Topology.of_world(tensor=1).data)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("k", [1, 10, 50])
def test_any_number_of_ranks_finds_the_same_bits(k: int) -> None:
    keys, queries = near_ties(4, 50, 6, "float16")
    alone = nearest(keys, queries, k)
    for world in (1, 2, 3):
        for found in run_ranks(world, on_a_rank, keys, queries, k):
            assert torch.equal(found.rows_Qk, alone.rows_Qk)
            assert torch.equal(found.distances_Qk, alone.distances_Qk)


@pytest.mark.slow
@pytest.mark.parametrize("equal", [False, True])
def test_memory_does_not_grow_with_the_keys(equal: bool) -> None:
    """Even if all keys have the same distance, so that none can be ruled out."""
    peaks = []
    with patch.object(search, "_ELEMENTS", 2**12):
        for rows in (2_000, 20_000):
            keys = np.random.default_rng(0).normal(size=(rows, 32)).astype(np.float16)
            if equal:
                keys[:] = 1
            with peak_of_arrays() as peak:
                nearest(keys, torch.zeros(4, 32), 8)
                peaks.append(peak())
    assert peaks[1] < 1.2 * peaks[0]
    assert peaks[1] < 20_000 * 32 * 2
