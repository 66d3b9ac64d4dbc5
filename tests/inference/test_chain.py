"""Many consecutive segments at once, on any number of ranks, give the losses of the walk segment by segment."""

from __future__ import annotations

from collections import Counter
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from megatron_style.inference.scoring.modes import MODES
from megatron_style.inference.scoring.protocol import Protocol
from megatron_style.inference.scoring.reader import Reader
from megatron_style.inference.scoring.score import score
from megatron_style.model.memory import Reach
from megatron_style.model.shortformer import Shortformer
from megatron_style.parallel.local_ranks import run_ranks
from megatron_style.parallel.sharding import initialise
from megatron_style.parallel.topology import Axis, Topology
from tests.support.models import MODELS, model_config
from tests.support.tiny import VOCAB_SIZE, tiny_config, tiny_model

TOKENS = np.random.default_rng(5).integers(0, VOCAB_SIZE, 83)
EOS = 2
REMEMBERING = [name for name in MODELS if model_config(name).model.cache]


def protocol_of(rows: int, L: int = 4, C: int = 4, **others: Any) -> Protocol:
    return Protocol("cached", L, C, batch_rows=rows, **others)


@torch.no_grad()
def one_row_walk(model: Shortformer, tokens: NDArray[np.int64], protocol: Protocol) -> NDArray[np.float64]:
    parts = MODES["cached"].read(Reader(model, tokens, EOS), protocol, [range(len(tokens))])
    return torch.cat([part.nll for part in parts]).double().numpy()


EVERY_WALK = {"shortformer", "transformer-xl", "compressive"}
WALKS = [(1, 4, 4), (3, 4, 4), (50, 4, 4), (2, 4, 6), (3, 4, 2), (2, 2, 8)]


@pytest.mark.parametrize(
    ("name", "rows", "L", "C"),
    [
        pytest.param(name, *walk, marks=() if name in EVERY_WALK or walk == (3, 4, 4) else pytest.mark.sweep)
        for name, walk in product(REMEMBERING, WALKS)
    ],
)
def test_it_is_the_walk_segment_by_segment(name: str, rows: int, L: int, C: int) -> None:
    model = tiny_model(model_config(name))
    protocol = protocol_of(rows, L, C)
    chained = score(model, TOKENS, protocol, eos=EOS).nll
    np.testing.assert_allclose(chained, one_row_walk(model, TOKENS, protocol), atol=1e-12)


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9, 16, 17, 18])
@pytest.mark.parametrize("rows", [1, 2, 3])
def test_a_text_may_end_anywhere(length: int, rows: int) -> None:
    model = tiny_model(tiny_config())
    protocol = protocol_of(rows)
    chained = score(model, TOKENS[:length], protocol, eos=EOS).nll
    np.testing.assert_allclose(chained, one_row_walk(model, TOKENS[:length], protocol), atol=1e-12)


@pytest.mark.parametrize("reach", [Reach(window=4), Reach(clamp=3), Reach(window=3, clamp=2)])
def test_relative_positions_keep_their_reach(reach: Reach) -> None:
    model = tiny_model(model_config("transformer-xl"))
    protocol = protocol_of(3, reach=reach)
    chained = score(model, TOKENS, protocol, eos=EOS).nll
    np.testing.assert_allclose(chained, one_row_walk(model, TOKENS, protocol), atol=1e-12)


# On several ranks


def passes_of(model: Shortformer) -> Counter[str]:
    """Return a count of passes and tokens that grows with each forward pass."""
    counts: Counter[str] = Counter()
    model.register_forward_pre_hook(lambda _, args: counts.update(passes=1, tokens=args[0].numel()))
    return counts


def score_on_ranks(
    name: str, protocol: Protocol, dtype: torch.dtype, tensor: int, sequence: bool = False
) -> tuple[Any, Counter[str]]:
    topology = Topology.of_world(tensor=tensor)
    config = model_config(name)
    model = Shortformer(config.model, config.vocab_size, topology.tensor, sequence=sequence)
    initialise(model, 3, topology.tensor)
    counts = passes_of(model.to(dtype))
    return score(model, TOKENS, protocol, eos=EOS, axis=topology.data).nll, counts


RANKS = product(
    ["baseline", "routing", "shortformer", "transformer-xl", "compressive"], [torch.float32, torch.bfloat16], [2, 4]
)
SUITE_RANKS = [
    ("baseline", torch.bfloat16, 2),
    ("routing", torch.float32, 2),
    ("shortformer", torch.float32, 4),
    ("shortformer", torch.bfloat16, 2),
    ("transformer-xl", torch.bfloat16, 2),
    ("compressive", torch.float32, 2),
]


@pytest.mark.parametrize(
    ("name", "dtype", "world"),
    [pytest.param(*case, marks=() if case in SUITE_RANKS else pytest.mark.sweep) for case in RANKS],
)
def test_the_number_of_ranks_changes_no_bit_and_divides_the_work(name: str, dtype: torch.dtype, world: int) -> None:
    """83 tokens are 21 segments: one is read alone, 20 are 4 passes of 5 rows."""
    caches = name in REMEMBERING
    protocol = protocol_of(5) if caches else Protocol("nonoverlapping", 4, batch_rows=5)
    ((alone, work),) = run_ranks(1, score_on_ranks, name, protocol, dtype, 1)
    opening = work["passes"] - 4 if name in ("shortformer", "transformer-xl") else 0
    results = run_ranks(world, score_on_ranks, name, protocol, dtype, 1)
    for nll, counts in results:
        assert np.array_equal(nll, alone)
        assert counts["passes"] - opening == -(-(work["passes"] - opening) // world)
        assert counts == results[0][1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sequence"),
    [
        ("shortformer", True),
        ("transformer-xl", False),
        pytest.param("shortformer", False, marks=pytest.mark.sweep),
        pytest.param("transformer-xl", True, marks=pytest.mark.sweep),
        pytest.param("compressive", False, marks=pytest.mark.sweep),
        ("compressive", True),
    ],
)
def test_tensor_ranks_chain_along_the_data_axis(name: str, sequence: bool) -> None:
    protocol = protocol_of(2)
    alone = score(tiny_model(model_config(name)), TOKENS, protocol, eos=EOS).nll
    for nll, _ in run_ranks(4, score_on_ranks, name, protocol, torch.float64, 2, sequence):
        np.testing.assert_allclose(nll, alone, atol=1e-9)


def shifted() -> list[float]:
    axis = Topology.of_world(tensor=1).data
    return axis.shift(torch.tensor([float(dist.get_rank())] * 2)).tolist()


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_shift_gives_each_rank_the_value_of_the_one_before(world: int) -> None:
    assert run_ranks(world, shifted) == [[(rank - 1) % world] * 2 for rank in range(world)]
    assert Axis().shift(torch.ones(1)).tolist() == [1]
