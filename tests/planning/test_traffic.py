"""Planned traffic against the messages that a real step sends."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401  what every engine imports, once before ranks are forked
import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_style.config.ds_file import read_ds_file
from megatron_style.config.run import RunConfig
from megatron_style.data.corpus import open_corpus
from megatron_style.engine.build import build_engine
from megatron_style.engine.gradients import accumulate_gradients
from megatron_style.engine.session import distributed_session
from megatron_style.parallel.local_ranks import run_ranks
from megatron_style.planning.setup import setup_of, sharding_of
from megatron_style.planning.text import text_facts
from megatron_style.planning.traffic import Traffic, estimate_traffic
from megatron_style.schedule.stages import StageSchedule, resolve_stage
from tests.support.runs import tiny_run
from tests.support.training import VOCAB_SIZE, write_corpus, write_ds_config

pytestmark = pytest.mark.slow

RANKS, MICROS, HIDDEN = 2, 2, 32
LARGE = 10_000  # bytes: more than a norm or a loss
COMPRESSED = {"compressed": 8, "rate": 2}
ROUTED = {
    "cache": False,
    "positions": "added",
    "routing": {"heads": 2, "clusters": 12, "window": 4, "local": 4},
}
ADAPTIVE = {"kind": "adaptive", "cutoffs": [10, 20], "factor": 2}


@dataclass(frozen=True)
class Case:
    zero: int = 0
    tensor: int = 1
    recompute: bool = False
    sequence: bool = False
    half: bool = False  # with gradients that add up in float32
    overlaps: bool = False
    vocabulary: dict[str, Any] = field(default_factory=lambda: {"kind": "tied"})
    model: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Sent:
    """One step of one rank."""

    total: float  # bytes
    messages: tuple[int, ...]  # bytes of each until the update, those to itself left out


class SentMessages(TorchDispatchMode):
    """What a rank of a ring sends: (r - 1)/r of each message, and of a reduction that all get twice that."""

    def __init__(self) -> None:
        super().__init__()
        self.total, self.sizes = 0.0, list[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            sizes = [sum(leaf.nbytes for leaf in tree_leaves(arg) if isinstance(leaf, Tensor)) for arg in args]
            ranks = next(ProcessGroup.unbox(arg).size() for arg in args if isinstance(arg, torch.ScriptObject))
            times = 2 if "allreduce" in func._schema.name else 1
            self.total += times * (ranks - 1) / ranks * max(sizes)
            if ranks > 1:
                self.sizes.append(max(sizes))
        return func(*args, **(kwargs or {}))


def sent_in_a_step(run: RunConfig) -> Sent:
    with distributed_session(tensor=run.parallel.tensor) as topology:
        corpus = open_corpus(run.data)
        schedule = StageSchedule(run, corpus_tokens=corpus.train_tokens, data_parallel=topology.data.size)
        engine = build_engine(run, schedule, corpus.vocab_size, topology)
        caches: Any = ()
        for step in range(4):  # the caches are empty in the first, and ZeRO 3 learns anew what follows what
            with SentMessages() as sent:
                _, caches = accumulate_gradients(engine, corpus, schedule.plan(step), caches, topology, run.seed)
                before_update = tuple(sent.sizes)
                engine.update(0.1)
        return Sent(sent.total, before_update)


def sent_and_planned(case: Case, folder: Path) -> tuple[Sent, Traffic]:
    write_corpus(folder, tokens=4000)
    zero: dict[str, Any] = {"stage": case.zero}
    if case.zero > (1 if case.half else 0):  # there are no buckets otherwise
        zero |= {"reduce_bucket_size": 1_000_000, "overlap_comm": case.overlaps}
    zero |= {"stage3_param_persistence_threshold": 0} if case.zero == 3 else {}
    half = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}} if case.half else {}
    run = tiny_run(
        stages=[{"segment_length": 16, "steps": 4}],
        tokens_per_batch=256,
        micro_rows=256 // 16 // MICROS,
        model={"hidden_size": HIDDEN, "vocabulary": case.vocabulary} | case.model,
        data={"train": str(folder / "train"), "valid": str(folder / "valid"), "vocab_size": VOCAB_SIZE},
        parallel={"tensor": case.tensor, "recompute": case.recompute, "sequence": case.sequence},
        deepspeed=str(write_ds_config(folder, zero_optimization=zero, **half)),
    )
    sent: Sent = run_ranks(RANKS, sent_in_a_step, run)[0]
    setup = setup_of(run, text_facts(run), sharding_of(run, read_ds_file(run.deepspeed)), gpus=RANKS)
    return sent, estimate_traffic(setup, resolve_stage(run, 0))


def sweep(case: Case) -> Any:
    return pytest.param(case, marks=pytest.mark.sweep)


@pytest.mark.parametrize(
    "case",
    [
        Case(tensor=2, vocabulary=ADAPTIVE),
        Case(tensor=2, vocabulary=ADAPTIVE, sequence=True),
        Case(zero=2),
        Case(zero=1, overlaps=True),
        sweep(Case()),
        sweep(Case(zero=1)),
        sweep(Case(zero=3)),
        sweep(Case(zero=1, tensor=2, recompute=True)),
        sweep(Case(tensor=2, model={"memory": COMPRESSED})),
        sweep(Case(tensor=2, recompute=True, model={"memory": COMPRESSED})),
        sweep(Case(zero=1, half=True)),
        sweep(Case(zero=2, half=True)),
        sweep(Case(zero=3, half=True)),
        sweep(Case(zero=1, model=ROUTED)),
        sweep(Case(tensor=2, model=ROUTED)),
        sweep(Case(tensor=2, recompute=True, sequence=True)),
        sweep(Case(tensor=2, sequence=True, model=ROUTED)),
        sweep(Case(tensor=2, sequence=True, recompute=True, model={"memory": COMPRESSED})),
        sweep(Case(tensor=2, sequence=True, model={"positions": "relative"})),
    ],
    ids=str,
)
def test_traffic_is_what_is_sent(case: Case, tmp_path: Path) -> None:
    sent, traffic = sent_and_planned(case, tmp_path)
    assert traffic.gradients + traffic.weights + traffic.tensor == pytest.approx(sent.total, rel=0.02)


@pytest.mark.parametrize(
    "case",
    [
        Case(tensor=2, vocabulary=ADAPTIVE),
        Case(tensor=2, vocabulary=ADAPTIVE, sequence=True),
        Case(tensor=2, recompute=True),
        sweep(Case(tensor=2)),
        sweep(Case(tensor=2, recompute=True, vocabulary=ADAPTIVE)),
        sweep(Case(tensor=2, vocabulary={"kind": "untied"})),
        sweep(Case(tensor=2, model={"memory": COMPRESSED})),
        sweep(Case(tensor=2, recompute=True, model={"memory": COMPRESSED})),
        sweep(Case(zero=1, tensor=2, vocabulary=ADAPTIVE)),
        sweep(Case(tensor=2, model=ROUTED)),
        sweep(Case(tensor=2, recompute=True, sequence=True)),
        sweep(Case(tensor=2, sequence=True, model=ROUTED)),
        sweep(Case(tensor=2, sequence=True, recompute=True, model={"memory": COMPRESSED})),
        sweep(Case(tensor=2, sequence=True, model={"positions": "relative"})),
        sweep(Case(tensor=2, recompute=True, model=ROUTED)),
    ],
    ids=str,
)
def test_tensor_parallel_messages_are_as_many_as_are_sent(case: Case, tmp_path: Path) -> None:
    sent, traffic = sent_and_planned(case, tmp_path)
    assert traffic.tensor_messages == len(sent.messages)


@pytest.mark.parametrize(
    ("case", "reductions"),
    [
        (Case(zero=1, overlaps=True), 1),
        pytest.param(Case(zero=1), 1, marks=pytest.mark.sweep),
        pytest.param(Case(zero=1, half=True, overlaps=True), 1, marks=pytest.mark.sweep),
        pytest.param(Case(zero=2, overlaps=True), MICROS, marks=pytest.mark.sweep),
    ],
    ids=str,
)
def test_only_zero_2_reduces_in_every_micro_batch(case: Case, reductions: int, tmp_path: Path) -> None:
    """Overlapping communication does not make ZeRO 1 reduce more often."""
    sent, _ = sent_and_planned(case, tmp_path)
    assert len([size for size in sent.messages if size > LARGE]) == reductions
