"""Planned traffic against the messages that a real step sends."""

from __future__ import annotations

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
from megatron_style.planning.communication import plan_traffic
from megatron_style.planning.corpus import text_facts
from megatron_style.planning.run_plan import setup_of
from megatron_style.planning.sharding import sharding_of
from megatron_style.runtime.build import build_engine
from megatron_style.runtime.local_ranks import run_ranks
from megatron_style.runtime.session import distributed_session
from megatron_style.schedule.stages import StageSchedule, resolve_stage
from megatron_style.train import accumulate_gradients
from tests.support.runs import tiny_run
from tests.support.training import VOCAB_SIZE, write_corpus, write_ds_config

RANKS = 2


class SentBytes(TorchDispatchMode):
    """What a rank of a ring sends: (r - 1)/r of each message, and of a reduction that all get twice that."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            sizes = [sum(leaf.nbytes for leaf in tree_leaves(arg) if isinstance(leaf, Tensor)) for arg in args]
            ranks = next(ProcessGroup.unbox(arg).size() for arg in args if isinstance(arg, torch.ScriptObject))
            times = 2 if "allreduce" in func._schema.name else 1
            self.total += times * (ranks - 1) / ranks * max(sizes)
        return func(*args, **(kwargs or {}))


def sent_in_a_step(run: RunConfig) -> float:
    with distributed_session(tensor=run.parallel.tensor) as topology:
        corpus = open_corpus(run.data)
        schedule = StageSchedule(run, corpus_tokens=len(corpus.train), data_parallel=topology.data.size)
        engine = build_engine(run, schedule, corpus.vocab_size, topology)
        caches: Any = ()
        sent = SentBytes()
        for step in range(4):  # the caches are empty in the first, and ZeRO 3 learns anew what follows what
            sent.total = 0
            with sent:
                _, caches = accumulate_gradients(engine, corpus, schedule.plan(step), caches, topology, run.seed)
                engine.update(0.1)
        return sent.total


@pytest.mark.parametrize(
    ("zero", "tensor", "recompute"),
    [
        (0, 2, False),
        (2, 1, False),
        pytest.param(0, 1, False, marks=pytest.mark.sweep),
        pytest.param(1, 1, False, marks=pytest.mark.sweep),
        pytest.param(3, 1, False, marks=pytest.mark.sweep),
        pytest.param(1, 2, True, marks=pytest.mark.sweep),
    ],
)
def test_traffic_is_what_is_sent(zero: int, tensor: int, recompute: bool, tmp_path: Path) -> None:
    write_corpus(tmp_path, tokens=4000)
    whole = {"stage3_param_persistence_threshold": 0} if zero == 3 else {}
    settings = {"zero_optimization": {"stage": zero, "reduce_bucket_size": 1_000_000, **whole}}
    run = tiny_run(
        stages=[{"segment_length": 16, "steps": 4}],
        tokens_per_batch=256,
        micro_rows=8,
        model={"hidden_size": 32},
        data={"train": str(tmp_path / "train"), "valid": str(tmp_path / "valid"), "vocab_size": VOCAB_SIZE},
        parallel={"tensor": tensor, "recompute": recompute},
        deepspeed=str(write_ds_config(tmp_path, **settings)),
    )
    sent = run_ranks(RANKS, sent_in_a_step, run)[0]
    setup = setup_of(run, text_facts(run), sharding_of(run, read_ds_file(run.deepspeed)), gpus=RANKS)
    traffic = plan_traffic(setup, resolve_stage(run, 0))
    assert traffic.gradients + traffic.weights + traffic.tensor == pytest.approx(sent, rel=0.02)
