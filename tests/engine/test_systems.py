"""The paper's comparison systems train as every model does: on any grid, across a stage switch, and resumed."""

from __future__ import annotations

from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.models import model_config
from tests.support.resuming import expect_bitwise, make_run, on_ranks
from tests.support.runs import tiny_run
from tests.support.training import VOCAB_SIZE, History, train_on, write_corpus, write_ds_config

pytestmark = pytest.mark.slow
TOKENS = 288  # over all data-parallel ranks
SYSTEMS = ["sandwich-shortformer", "transformer-xl-adaptive", "compressive", "routing-first-local"]
SYSTEMS += ["sandwich", "norm-after", "transformer-xl", "transformer-xl-before", "transformer-xl-base", "routing"]
SYSTEMS += ["compressive-before", "compressive-mean", "compressive-shortformer"]
GRIDS = {  # ZeRO stage, tensor-parallel and data-parallel ranks, micro-batches, recompute
    "zero0": (0, 2, 1, 3, True),
    "zero1": (1, 1, 2, 1, False),
    "zero2": (2, 2, 2, 3, False),
    "zero3": (3, 1, 2, 1, True),
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    write_corpus(folder)
    return folder


def train_system(
    corpus: Path,
    system: str,
    *,
    zero: int = 0,
    tensor: int = 1,
    data: int = 1,
    accumulation: int = 1,
    recompute: bool = False,
) -> History:
    tokens = TOKENS // data
    stages = [
        {"segment_length": length, "steps": 3, "micro_rows": tokens // length // accumulation} for length in (16, 48)
    ]
    run = tiny_run(
        stages=stages,
        tokens_per_batch=tokens,
        model=model_config(system).model.as_data(),
        data={"train": str(corpus / "train"), "valid": str(corpus / "valid"), "vocab_size": VOCAB_SIZE},
        # Adam would make whole steps of the rounding of gradients that are zero, without a large eps.
        optimizer={"name": "adamw", "clip_norm": 0.5, "eps": 1e-5, "learning_rate": {"peak": 0.01}},
        parallel={"tensor": tensor, "recompute": recompute},
        deepspeed=str(write_ds_config(corpus, zero_optimization={"stage": zero})) if zero else None,
    )
    return train_on(tensor * data, run)


@cache
def one_process(corpus: Path, system: str) -> History:
    return train_system(corpus, system)


IN_THE_SUITE = {
    ("sandwich-shortformer", "zero0"),
    ("sandwich-shortformer", "zero3"),
    ("transformer-xl-adaptive", "zero0"),
    ("transformer-xl-adaptive", "zero1"),
    ("compressive", "zero1"),
    ("compressive", "zero2"),
    ("routing-first-local", "zero0"),
    ("routing-first-local", "zero3"),
}


@pytest.mark.parametrize(
    ("system", "grid"),
    [pytest.param(*case, marks=() if case in IN_THE_SUITE else pytest.mark.sweep) for case in product(SYSTEMS, GRIDS)],
)
def test_a_grid_computes_what_one_process_computes(corpus: Path, system: str, grid: str) -> None:
    zero, tensor, data, accumulation, recompute = GRIDS[grid]
    expected = one_process(corpus, system)
    found = train_system(
        corpus, system, zero=zero, tensor=tensor, data=data, accumulation=accumulation, recompute=recompute
    )
    assert all(found.applied)
    np.testing.assert_allclose(found.losses, expected.losses, rtol=1e-5)
    np.testing.assert_allclose(found.norms, expected.norms, rtol=1e-5)
    for name, weight in expected.weights.items():
        np.testing.assert_allclose(found.weights[name], weight, atol=1e-5, err_msg=name)


@pytest.mark.parametrize(
    ("system", "half"),
    [
        pytest.param("sandwich-shortformer", True, marks=pytest.mark.sweep),
        ("transformer-xl-adaptive", False),
        pytest.param("compressive", True, marks=pytest.mark.sweep),
        pytest.param("compressive", False, marks=pytest.mark.sweep),
        pytest.param("compressive-shortformer", True, marks=pytest.mark.sweep),
        ("routing", True),
        pytest.param("routing-first-local", False, marks=pytest.mark.sweep),
        pytest.param("transformer-xl", True, marks=pytest.mark.sweep),
        pytest.param("sandwich", False, marks=pytest.mark.sweep),
    ],
)
def test_a_stopped_run_equals_one_that_was_not(tmp_path: Path, system: str, half: bool) -> None:
    """The stages switch at step 4; the run stops before and after, on two tensor-parallel ranks, with dropout."""
    write_corpus(tmp_path)
    model = model_config(system).model.as_data()
    del model["dropout"]
    settings: dict[str, Any] = {"steps": 8, "tensor": 2, "zero": 1, "dropout": True, "half": half, "model": model}
    settings["optimizer"] = {"name": "adamw", "learning_rate": {"peak": 0.01}}
    complete = make_run(tmp_path, "complete", **settings)
    parts = make_run(tmp_path, "parts", **settings)
    on_ranks(complete, 2)
    on_ranks(parts, 2, halt_after=3)
    on_ranks(parts, 2, halt_after=2)
    on_ranks(parts, 2)
    expect_bitwise(parts, complete)
