"""Between two steps only DeepSpeed waits for the device, to check that the gradients are finite."""

from __future__ import annotations

import os
import signal
import time
import traceback
from collections import Counter
from itertools import count, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_style.config.run import OutputConfig, RunConfig
from megatron_style.data.corpus import open_corpus
from megatron_style.engine.build import build_engine
from megatron_style.engine.gradients import accumulate_gradients
from megatron_style.engine.session import distributed_session
from megatron_style.journal.journal import Journal
from megatron_style.model.memory import Memory
from megatron_style.parallel.local_ranks import run_ranks
from megatron_style.schedule.stages import StageSchedule
from megatron_style.supervision.signals import StopSignals
from megatron_style.supervision.stop import StopRequest
from tests.support.runs import tiny_run
from tests.support.training import VOCAB_SIZE, write_corpus, write_ds_config

pytestmark = pytest.mark.slow


class Waits(TorchDispatchMode):
    """Counts who asks for the value of a tensor: `item`, `float`, `int`, `bool`, an `if`. With the tensor on a device,
    each of them is a wait. So is `tolist`, which torch does not dispatch."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.by: Counter[str] = Counter()

    def __enter__(self) -> Waits:
        self._tolist = torch.Tensor.tolist
        torch.Tensor.tolist = lambda tensor: (self.note(), self._tolist(tensor))[1]  # type: ignore[method-assign]
        return super().__enter__()  # type: ignore[no-any-return]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.Tensor.tolist = self._tolist  # type: ignore[method-assign]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            self.note()
        return func(*args, **(kwargs or {}))

    def note(self) -> None:
        inside = any("/deepspeed/" in frame.filename for frame in traceback.extract_stack())
        self.by["deepspeed" if inside else "ours"] += 1


def count_waits(run: RunConfig) -> list[Counter[str]]:
    """Of a step that is not shown, and of one that is."""
    with distributed_session(tensor=run.parallel.tensor) as topology:
        corpus = open_corpus(run.data)
        schedule = StageSchedule(run, corpus_tokens=corpus.train_tokens, data_parallel=topology.data.size)
        engine = build_engine(run, schedule, corpus.vocab_size, topology)
        stop = StopRequest(StopSignals(), run.output, engine.device)
        caches: tuple[Memory, ...] = ()
        counted = []
        with Journal(run, schedule, engine, topology, first_step=0) as journal:
            for step, show in enumerate((True, True, False, True)):
                with Waits() as waits:
                    plan = schedule.plan(step)
                    loss, caches = accumulate_gradients(engine, corpus, plan, caches, topology, run.seed)
                    update = engine.update(0.1)
                    assert stop.agreed() == (None, False)
                    journal.step(plan, loss, update, 1.0, show=show)
                counted.append(waits.by)
        return counted[2:]  # in the first ones ZeRO 3 compares its order of weights between the ranks


@pytest.mark.parametrize(("zero", "half"), [(0, False), (1, True), (2, True), (3, True)])
def test_at_most_one_wait_is_ours(tmp_path: Path, zero: int, half: bool) -> None:
    write_corpus(tmp_path)
    run = tiny_run(
        stages=[{"segment_length": 8, "steps": 5, "micro_rows": 2}],
        tokens_per_batch=48,
        data={"train": str(tmp_path / "train"), "valid": str(tmp_path / "valid"), "vocab_size": VOCAB_SIZE},
        output={"path": str(tmp_path / "run"), "stop_after": "1h", "save_every": "30m"},
        deepspeed=str(write_ds_config(tmp_path, zero_optimization={"stage": zero}, bf16={"enabled": half})),
    )
    unseen, shown = run_ranks(2, count_waits, run)[0]
    assert unseen["ours"] == (1 if zero == 0 else 0)  # without ZeRO the norm is ours
    assert shown["ours"] == unseen["ours"] + 1
    assert unseen["deepspeed"] == shown["deepspeed"] <= 4


def agree_on_a_signal() -> list[str | None]:
    rank = int(os.environ["RANK"])
    stop = StopRequest(StopSignals(), OutputConfig(path=Path("run")), torch.device("cpu"))
    verdicts = [stop.agreed().stop]
    if rank == 1:
        os.kill(os.getpid(), signal.SIGUSR1)
    return verdicts + [stop.agreed().stop for _ in range(3)]


def test_all_ranks_leave_after_the_step_that_follows_a_request() -> None:
    verdicts = run_ranks(3, agree_on_a_signal)
    assert verdicts == [[None, None, "a signal asked for it", "a signal asked for it"]] * 3


def agree_on_saves() -> list[bool]:
    """Take twelve steps of 0.1 s, by a clock of this rank's own."""
    tick = count(int(os.environ["RANK"]))
    with patch("megatron_style.supervision.stop.time", SimpleNamespace(monotonic=lambda: 0.1 * next(tick))):
        stop = StopRequest(StopSignals(), OutputConfig(path=Path("run"), save_every="0.35s"), torch.device("cpu"))
        return [stop.agreed().save for _ in range(12)]


def test_all_ranks_save_after_the_step_that_follows_the_time() -> None:
    """One clock decides, and none of the ranks waits for it in the step itself."""
    verdicts = run_ranks(3, agree_on_saves)
    assert verdicts == [verdicts[0]] * 3
    assert verdicts[0].count(True) == 2
    assert not any(before and after for before, after in pairwise(verdicts[0]))


def save_for_another_reason() -> list[bool]:
    stop = StopRequest(StopSignals(), OutputConfig(path=Path("run"), save_every="0.05s"), torch.device("cpu"))
    time.sleep(0.1)
    first = stop.agreed().save  # asks for a save
    stop.saved()  # at the end of a stage, say
    return [first, stop.agreed().save]


def test_a_save_for_another_reason_replaces_the_one_that_is_due() -> None:
    assert run_ranks(2, save_for_another_reason) == [[False, False]] * 2
