"""Any grid computes what one process computes: losses, gradient norms and weights, across a stage switch."""

from __future__ import annotations

from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_style.config.run import RunConfig
from tests.support.runs import tiny_run
from tests.support.training import VOCAB_SIZE, History, train_on, write_corpus, write_ds_config

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("always_by_onednn")]

GRIDS = {"TP1xDP1": (1, 1), "TP1xDP2": (1, 2), "TP2xDP1": (2, 1), "TP2xDP2": (2, 2)}
LEARNING_RATES = {"nag": 0.3, "adamw": 0.01}
TOKENS = 288  # over all data-parallel ranks


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    write_corpus(folder)
    return folder


def run_on(
    corpus: Path,
    optimizer: str,
    *,
    tensor: int = 1,
    data: int = 1,
    accumulation: int = 1,
    recompute: bool = False,
    zero: int = 0,
    **parallel: Any,
) -> RunConfig:
    lengths = (16, 48)
    stages = [
        {"segment_length": length, "steps": 4, "micro_rows": TOKENS // data // length // accumulation}
        for length in lengths
    ]
    return tiny_run(
        stages=stages,
        tokens_per_batch=TOKENS // data,
        data={"train": str(corpus / "train"), "valid": str(corpus / "valid"), "vocab_size": VOCAB_SIZE},
        optimizer={
            "name": optimizer,
            "clip_norm": 0.5,
            # A key's bias moves all scores of a query alike, so its gradient is zero but for rounding. Adam divides by
            # the gradient's size, and with the usual 1e-8 would make whole steps of that rounding.
            "eps": 1e-5,
            "learning_rate": {"peak": LEARNING_RATES[optimizer], "warmup_steps": 2},
        },
        parallel={"tensor": tensor, "recompute": recompute} | parallel,
        deepspeed=str(write_ds_config(corpus, zero_optimization={"stage": zero})) if zero else None,
    )


@cache
def one_process(corpus: Path, optimizer: str) -> History:
    return train_on(1, run_on(corpus, optimizer))


def expect_same(history: History, expected: History) -> None:
    assert all(history.applied)
    np.testing.assert_allclose(history.losses, expected.losses, rtol=1e-5)
    np.testing.assert_allclose(history.norms, expected.norms, rtol=1e-5)
    assert history.weights.keys() == expected.weights.keys()
    for name, weight in expected.weights.items():
        np.testing.assert_allclose(history.weights[name], weight, atol=1e-5, err_msg=name)


SUITE = [
    (zero, grid, 3 if (zero + index) % 2 else 1, bool((zero + index // 2) % 2), "adamw" if zero % 2 else "nag")
    for zero, (index, grid) in product(range(4), enumerate(GRIDS))
]
MATRIX = [case for case in product(range(4), GRIDS, (1, 3), (False, True), LEARNING_RATES) if case not in SUITE]


def name_of(case: tuple[int, str, int, bool, str]) -> str:
    zero, grid, accumulation, recompute, optimizer = case
    return f"zero{zero}-{grid}-accumulate{accumulation}-{'recompute' if recompute else 'stored'}-{optimizer}"


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=name_of(case)) for case in SUITE]
    + [pytest.param(case, id=name_of(case), marks=pytest.mark.sweep) for case in MATRIX],
)
def test_a_grid_computes_what_one_process_computes(corpus: Path, case: tuple[int, str, int, bool, str]) -> None:
    zero, grid, accumulation, recompute, optimizer = case
    tensor, data = GRIDS[grid]
    run = run_on(corpus, optimizer, tensor=tensor, data=data, accumulation=accumulation, recompute=recompute, zero=zero)
    expect_same(train_on(tensor * data, run), one_process(corpus, optimizer))


SPLITS: dict[str, dict[str, Any]] = {
    "sequence": {"sequence": True},
    "host": {"cache": "host"},
    "both": {"sequence": True, "cache": "host"},
}
TENSOR_PARALLEL = {"TP2xDP1": (2, 1), "TP2xDP2": (2, 2), "TP4xDP1": (4, 1)}
SPLIT_SUITE = [
    (0, "TP2xDP1", 3, True, "sequence"),
    (1, "TP2xDP1", 1, False, "host"),
    (2, "TP4xDP1", 1, False, "sequence"),
    (3, "TP2xDP2", 3, True, "both"),
]
SPLIT_MATRIX = [
    case for case in product(range(4), TENSOR_PARALLEL, (1, 3), (False, True), SPLITS) if case not in SPLIT_SUITE
]


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=name_of(case)) for case in SPLIT_SUITE]
    + [pytest.param(case, id=name_of(case), marks=pytest.mark.sweep) for case in SPLIT_MATRIX],
)
def test_so_does_a_grid_that_splits_what_is_replicated(corpus: Path, case: tuple[int, str, int, bool, str]) -> None:
    """Segments of the last step of an epoch are short; not all of them can be divided among the ranks."""
    zero, grid, accumulation, recompute, split = case
    tensor, data = TENSOR_PARALLEL[grid]
    optimizer = "adamw" if zero % 2 else "nag"
    settings = {"accumulation": accumulation, "recompute": recompute, "zero": zero, **SPLITS[split]}
    run = run_on(corpus, optimizer, tensor=tensor, data=data, **settings)
    expect_same(train_on(tensor * data, run), one_process(corpus, optimizer))


@pytest.mark.parametrize("recompute", [pytest.param(False, marks=pytest.mark.sweep), True], ids=["stored", "recompute"])
def test_caches_on_the_host_change_no_bit(corpus: Path, recompute: bool) -> None:
    run = partial(run_on, corpus, "nag", tensor=2, accumulation=3, recompute=recompute, zero=1, sequence=True)
    found = train_on(2, run(cache="host"))
    expected = train_on(2, run(cache="device"))
    assert found.losses == expected.losses
    assert found.norms == expected.norms
    for name, weight in expected.weights.items():
        assert torch.equal(found.weights[name], weight), name


def test_the_model_learns(corpus: Path) -> None:
    for optimizer in LEARNING_RATES:
        losses = one_process(corpus, optimizer).losses
        assert losses[-1] < losses[0] - 0.1
