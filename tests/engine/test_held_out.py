"""Evaluation during training: shared by the data-parallel ranks, whose number changes no bit of the result."""

from __future__ import annotations

from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from megatron_style.config.run import RunConfig
from megatron_style.data.corpus import open_corpus
from megatron_style.engine.build import build_engine
from megatron_style.engine.session import distributed_session
from megatron_style.inference.held_out import HeldOut, held_out
from megatron_style.parallel.local_ranks import run_ranks
from megatron_style.schedule.stages import StageSchedule
from tests.support.models import COMPRESSED
from tests.support.resuming import make_run

pytestmark = pytest.mark.slow

MODELS: dict[str, dict[str, Any]] = {
    "baseline": {"positions": "added", "cache": False},
    "shortformer": {},
    "compressive": {"positions": "relative", "norm": "after", "memory": COMPRESSED},
}


def evaluated(run: RunConfig) -> tuple[HeldOut, int]:
    """Return the result of an evaluation, and the number of passes that this rank has made for it."""
    with distributed_session(tensor=run.parallel.tensor) as topology:
        corpus = open_corpus(run.data)
        schedule = StageSchedule(run, corpus_tokens=corpus.train_tokens, data_parallel=topology.data.size)
        engine = build_engine(run, schedule, corpus.vocab_size, topology)
        counts: Counter[str] = Counter()
        engine.model.register_forward_pre_hook(lambda *_: counts.update(passes=1))
        found = held_out(engine.model, corpus, corpus.main_valid, run.output, schedule.stages[-1], topology.data)
        return found, counts["passes"]


@pytest.mark.parametrize(
    ("name", "zero", "half", "worlds"),
    [
        ("baseline", 1, True, (2,)),
        ("shortformer", 3, False, (4,)),
        ("compressive", 3, True, (2,)),
        *(pytest.param(*case, (2, 4), marks=pytest.mark.sweep) for case in product(MODELS, (1, 3), (False, True))),
    ],
)
def test_the_number_of_ranks_changes_no_bit_and_divides_the_work(
    folder: Path, name: str, zero: int, half: bool, worlds: tuple[int, ...]
) -> None:
    """1200 tokens are 50 segments: one is read alone by a model whose memory begins empty, the others in passes of 2.
    ZeRO 3 would wait for ever if a rank made fewer passes."""
    output = {"evaluate_tokens": None, "sample_tokens": 0}
    run = make_run(folder, model=MODELS[name], zero=zero, half=half, output=output)
    ((alone, passes),) = run_ranks(1, evaluated, run)
    opening = 1 if name == "shortformer" else 0
    assert passes == opening + 25
    for world in worlds:
        share = {2: 13, 4: 7}[world]
        assert run_ranks(world, evaluated, run) == [(alone, opening + share)] * world


@pytest.mark.parametrize("zero", [pytest.param(0, marks=pytest.mark.sweep), 3])
def test_tensor_ranks_evaluate_what_one_process_does(folder: Path, zero: int) -> None:
    ((alone, _),) = run_ranks(1, evaluated, make_run(folder, zero=zero))
    for found, _ in run_ranks(4, evaluated, make_run(folder, tensor=2, zero=zero)):
        assert found.loss == pytest.approx(alone.loss, rel=1e-5)
        assert found.by_position == pytest.approx(alone.by_position, rel=1e-4)
