"""Laws of a training step: what a stage switch keeps, what dropout samples, what a bad gradient must not change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_style.base.errors import RunFailed, UserError
from megatron_style.config.run import RunConfig
from megatron_style.data.corpus import open_corpus
from megatron_style.engine.build import build_engine
from megatron_style.engine.engine import TrainingEngine
from megatron_style.engine.gradients import accumulate_gradients
from megatron_style.engine.preflight import preflight
from megatron_style.engine.session import distributed_session
from megatron_style.model.memory import Memory
from megatron_style.parallel.dropout import replicated_dropout, sharded_relu
from megatron_style.parallel.local_ranks import run_ranks
from megatron_style.parallel.randomness import Noise, seed_sharded_dropout
from megatron_style.parallel.topology import Topology
from megatron_style.schedule.stages import StageSchedule
from tests.support.runs import tiny_run
from tests.support.training import VOCAB_SIZE, History, full_weights, train_on, write_corpus, write_ds_config

pytestmark = pytest.mark.slow
STAGES = [{"segment_length": 8, "steps": 3}, {"segment_length": 24, "steps": 3}]
DROPOUT = {"hidden": 0.3, "attention": 0.2, "activation": 0.2, "softmax": 0.2}


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    write_corpus(tmp_path)
    return tmp_path


def small_run(corpus: Path, *, ds: dict[str, Any] | None = None, dropout: bool = False, **sections: Any) -> RunConfig:
    base = tiny_run().model.as_data()
    return tiny_run(
        stages=sections.pop("stages", STAGES),
        tokens_per_batch=sections.pop("tokens_per_batch", 96),
        micro_rows=sections.pop("micro_rows", None),
        model=base | {"dropout": DROPOUT if dropout else {}},
        data={"train": str(corpus / "train"), "valid": str(corpus / "valid"), "vocab_size": VOCAB_SIZE},
        optimizer={"clip_norm": 0.5, "learning_rate": {"peak": 0.1}} | sections.pop("optimizer", {}),
        deepspeed=str(write_ds_config(corpus, **ds)) if ds else None,
        **sections,
    )


class Trainer:
    """A run that a test takes step by step."""

    def __init__(self, run: RunConfig, topology: Topology) -> None:
        self.run, self.topology = run, topology
        self.corpus = open_corpus(run.data)
        self.schedule = StageSchedule(run, corpus_tokens=self.corpus.train_tokens, data_parallel=topology.data.size)
        self.engine: TrainingEngine = build_engine(run, self.schedule, self.corpus.vocab_size, topology)
        self.caches: tuple[Memory, ...] = ()

    def backward(self, step: int) -> float:
        plan = self.schedule.plan(step)
        loss, self.caches = accumulate_gradients(
            self.engine, self.corpus, plan, self.caches, self.topology, self.run.seed
        )
        return self.topology.data.sum(loss.nll).item()

    def step(self, step: int) -> float:
        loss = self.backward(step)
        assert self.engine.update(0.1).applied
        return loss

    def state(self) -> dict[str, bytes]:
        """Every byte that decides the next step: weights, optimizer state, caches."""
        optimizer = self.engine._engine.optimizer
        inner = getattr(optimizer, "optimizer", optimizer)
        state = {
            f"{index}.{name}": value
            for index, values in enumerate(inner.state.values())
            for name, value in values.items()
            if isinstance(value, torch.Tensor)
        }
        state |= full_weights(self.engine)
        state |= {f"cache {m} {n}": x for m, cache in enumerate(self.caches) for n, x in enumerate(cache.layers)}
        return {name: value.detach().float().numpy().tobytes() for name, value in state.items()}


def optimizer_bytes(trainer: Trainer) -> dict[str, bytes]:
    return {name: value for name, value in trainer.state().items() if name[0].isdigit()}


def switch_stages(run: RunConfig) -> None:
    with distributed_session(tensor=run.parallel.tensor) as topology:
        trainer = Trainer(run, topology)
        for step in range(3):
            trainer.step(step)
        before = optimizer_bytes(trainer)
        assert any(any(value) for value in before.values())
        assert trainer.schedule.opens_stage(3)
        trainer.backward(3)
        assert optimizer_bytes(trainer) == before


@pytest.mark.parametrize(
    ("zero", "optimizer"),
    [(0, "nag"), (1, "adamw"), (2, "nag"), (3, "adamw")]
    + [pytest.param(*case, marks=pytest.mark.sweep) for case in ((0, "adamw"), (1, "nag"), (2, "adamw"), (3, "nag"))],
)
def test_a_switch_leaves_the_optimizer_as_it_is(corpus: Path, zero: int, optimizer: str) -> None:
    run = small_run(corpus, ds={"zero_optimization": {"stage": zero}}, optimizer={"name": optimizer})
    run_ranks(2, switch_stages, run)


def train_with_preflight(run: RunConfig, with_preflight: bool) -> tuple[list[float], dict[str, bytes]]:
    with distributed_session(tensor=run.parallel.tensor) as topology:
        trainer = Trainer(run, topology)
        if with_preflight:
            peaks = list(preflight(trainer.engine, trainer.schedule.stages))
            assert [stage.segment_length for stage, _ in peaks] == [24, 8]  # the largest first
            assert all(peak > 0 for _, peak in peaks)
        losses = []
        for step in range(trainer.schedule.total_steps):
            if with_preflight and step == 2:  # as in a resumed run, whose optimizer has a state
                list(preflight(trainer.engine, trainer.schedule.stages))
            losses.append(trainer.step(step))
        return losses, trainer.state()


@pytest.mark.parametrize("ds", [
    {"zero_optimization": {"stage": 0}},
    pytest.param({"zero_optimization": {"stage": 1}}, marks=pytest.mark.sweep),
    pytest.param({"zero_optimization": {"stage": 2}}, marks=pytest.mark.sweep),
    {"zero_optimization": {"stage": 3}},
    {"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
    {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}},
], ids=["zero0", "zero1", "zero2", "zero3", "zero1-bf16", "zero2-bf16"])  # fmt: skip
def test_preflight_leaves_no_trace(corpus: Path, ds: dict[str, Any]) -> None:
    optimizer = {"name": "adamw" if "bf16" in ds else "nag", "weight_decay": 0.1}
    run = small_run(corpus, ds=ds, dropout=True, micro_rows=2, optimizer=optimizer)
    assert run_ranks(2, train_with_preflight, run, True) == run_ranks(2, train_with_preflight, run, False)


def preflight_in_little_memory(run: RunConfig) -> None:
    import resource

    with distributed_session(tensor=1) as topology:
        trainer = Trainer(run, topology)
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + 60 * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        with pytest.raises(
            UserError, match=r"stage 2: .* does not fit into memory; set stages.1.micro_rows to 512 or less"
        ):
            list(preflight(trainer.engine, trainer.schedule.stages))


def test_a_stage_that_does_not_fit_is_refused_before_the_first_step(tmp_path: Path) -> None:
    """So much of it that no reuse of memory freed before makes it fit."""
    write_corpus(tmp_path, tokens=2_200_000)
    stages = [{"segment_length": 8, "steps": 1, "micro_rows": 1}, {"segment_length": 1024, "steps": 1}]
    run = small_run(tmp_path, stages=stages, tokens_per_batch=1024 * 1024)
    run_ranks(1, preflight_in_little_memory, run)


def masks() -> tuple[list[int], list[int]]:
    topology = Topology.of_world(tensor=2)
    noise = Noise(5)
    seed_sharded_dropout(noise, tensor_rank=topology.tensor.rank)
    ones = torch.ones(200)
    return replicated_dropout(ones, 0.5, noise).tolist(), sharded_relu(ones, 0.5, noise).tolist()


def test_tensor_ranks_drop_the_same_of_what_they_share_and_not_of_what_they_split() -> None:
    (shared_0, split_0), (shared_1, split_1) = run_ranks(2, masks)
    assert shared_0 == shared_1
    assert split_0 != split_1
    assert set(shared_0) == set(split_0) == {0.0, 2.0}


@pytest.mark.parametrize(("tensor", "data"), [(1, 1), (2, 1), pytest.param(2, 2, marks=pytest.mark.sweep)])
def test_recomputing_draws_the_same_dropout_again(corpus: Path, tensor: int, data: int) -> None:
    stored, recomputed = (
        train_on(tensor * data, small_run(corpus, dropout=True, parallel={"tensor": tensor, "recompute": recompute}))
        for recompute in (False, True)
    )
    assert stored.losses == recomputed.losses
    assert stored.norms == recomputed.norms
    assert all(torch.equal(weight, recomputed.weights[name]) for name, weight in stored.weights.items())


def test_dropout_differs_from_step_to_step_and_rank_to_rank() -> None:
    keys = {Noise(1).at(place).key for place in range(100)} | {Noise(2).at(place).key for place in range(100)}
    assert len(keys) == 200


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_bf16_trains(corpus: Path, zero: int) -> None:
    stages = [{"segment_length": 8, "steps": 8}, {"segment_length": 24, "steps": 8}]
    run = small_run(corpus, stages=stages, ds={"zero_optimization": {"stage": zero}, "bf16": {"enabled": True}},
                    optimizer={"name": "adamw", "learning_rate": {"peak": 0.01}})  # fmt: skip
    history = train_on(2, run)
    assert all(history.applied)
    assert np.mean(history.losses[-3:]) < history.losses[0] - 0.5


def poison(run: RunConfig) -> None:
    with distributed_session(tensor=run.parallel.tensor) as topology:
        trainer = Trainer(run, topology)
        trainer.step(0)
        before, caches = trainer.state(), trainer.caches
        for _ in range(2):
            trainer.backward(1)
            poison_gradient(trainer)
            assert not trainer.engine.update(0.1).applied
            trainer.caches = caches
            assert trainer.state() == before
        trainer.step(1)
        assert trainer.state() != before
        for _ in range(2):
            trainer.backward(2)
            poison_gradient(trainer)
            trainer.engine.update(0.1)
        trainer.backward(2)
        poison_gradient(trainer)
        with pytest.raises(RunFailed, match="3 steps in a row are not finite"):
            trainer.engine.update(0.1)


def poison_gradient(trainer: Trainer) -> None:
    """One more micro-batch, whose loss is not a number on one rank only."""
    ids = torch.zeros(1, 8, dtype=torch.long)
    nll, *_ = trainer.engine.forward(ids, ids, trainer.engine.model.empty_memory(1, 0), None)
    factor = float("nan") if trainer.topology.data.rank == 1 else 0.0
    trainer.engine.accumulate(nll.sum() * factor, is_last=True)


@pytest.mark.parametrize(("zero", "bf16"), [(0, False), (1, False), (2, False), (3, False), (1, True)])
def test_a_gradient_that_is_not_finite_changes_nothing(corpus: Path, zero: int, bf16: bool) -> None:
    ds = {"zero_optimization": {"stage": zero}} | ({"bf16": {"enabled": True}} if bf16 else {})
    run_ranks(2, poison, small_run(corpus, ds=ds, optimizer={"max_skipped": 3}))


COMPILES = pytest.mark.sweep  # DeepSpeed's own Adam, for more than a minute


@pytest.mark.parametrize(
    ("zero", "optimizer"),
    [(1, "nag"), (3, "nag"), pytest.param(2, "adamw", marks=COMPILES), pytest.param(3, "adamw", marks=COMPILES)],
)
def test_offloading_changes_nothing(corpus: Path, zero: int, optimizer: str) -> None:
    """AdamW becomes DeepSpeed's own CPU Adam, which is compiled on first use: the first case with it takes a minute."""

    def history(**offload: Any) -> History:
        settings = {"name": optimizer, "eps": 1e-5, "learning_rate": {"peak": 0.1 if optimizer == "nag" else 0.01}}
        return train_on(2, small_run(corpus, ds={"zero_optimization": {"stage": zero} | offload}, optimizer=settings))

    offload = {"offload_optimizer": {"device": "cpu"}} | ({"offload_param": {"device": "cpu"}} if zero == 3 else {})
    here, offloaded = history(), history(**offload)
    np.testing.assert_allclose(offloaded.losses, here.losses, rtol=1e-5)
    np.testing.assert_allclose(offloaded.norms, here.norms, rtol=1e-5)


def test_optimizer_and_schedule_may_live_in_the_ds_config(corpus: Path) -> None:
    """And ZeRO does not change what they do there."""
    ds = {
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 3}},
    }
    without, with_zero = (
        train_on(
            2, small_run(corpus, ds=ds | {"zero_optimization": {"stage": zero}}, optimizer={"learning_rate": None})
        )
        for zero in (0, 1)
    )
    np.testing.assert_allclose(with_zero.losses, without.losses, rtol=1e-5)
    assert without.losses[-1] < without.losses[0] - 0.5
