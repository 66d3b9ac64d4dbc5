"""Centroids of a routing model learn once per update, after the optimizer, and are part of every saved model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_style.base.errors import UserError
from megatron_style.checkpoint.logical import BUFFERS, LogicalReader
from megatron_style.checkpoint.manifest import read_manifest
from megatron_style.checkpoint.reshard import reshard
from megatron_style.config.run import RunConfig
from megatron_style.data.corpus import open_corpus
from megatron_style.engine.build import build_engine
from megatron_style.engine.gradients import accumulate_gradients
from megatron_style.engine.session import distributed_session
from megatron_style.engine.spikes import Spike
from megatron_style.formats import model_folder, run_checkpoint
from megatron_style.formats.transfer import transfer
from megatron_style.model.routing import moved
from megatron_style.parallel.local_ranks import run_ranks
from megatron_style.schedule.stages import StageSchedule
from tests.support.models import model_config
from tests.support.resuming import expect_close, exported_weights, make_run, metrics, on_ranks
from tests.support.training import write_corpus

pytestmark = pytest.mark.slow
HEADS = "blocks.1.attention.routed"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_corpus(tmp_path)
    return tmp_path


def routing_run(folder: Path, name: str = "run", **more: Any) -> RunConfig:
    model = model_config("routing-first-local").model.as_data()
    del model["dropout"]
    # With a lower decay than a long run's, centroids are elsewhere after a few steps.
    model["routing"]["decay"] = 0.9
    optimizer = {"name": "adamw", "eps": 1e-5, "learning_rate": {"peak": 0.01}}
    return make_run(folder, name, model=model, optimizer=optimizer, **more)


def one_update(run: RunConfig, how: str) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor, bool]:
    """Return the centroids before and after an update, the tally of all ranks, and whether they were moved."""
    with distributed_session(tensor=run.parallel.tensor) as topology:
        corpus = open_corpus(run.data)
        schedule = StageSchedule(run, corpus_tokens=corpus.train_tokens, data_parallel=topology.data.size)
        engine = build_engine(run, schedule, corpus.vocab_size, topology)
        before = engine.state.full_buffers()
        accumulate_gradients(engine, corpus, schedule.plan(0), (), topology, run.seed)
        assert engine._tally is not None
        tally = topology.data.sum(engine._tally)
        if how == "not finite":
            parameter = next(engine.model.parameters())
            assert parameter.grad is not None
            parameter.grad.fill_(torch.inf)
        spike = Spike(9.0, 3.0, "skip") if how == "spike" else None
        update = engine.update(0.01, spike=spike)
        assert engine._tally is None
        return before, engine.state.full_buffers(), tally, update.applied


def test_an_update_moves_them_by_one_step_of_all_its_micro_batches(folder: Path) -> None:
    run = routing_run(folder, data=2, micro_tokens=24)
    assert run.data.tokens_per_batch == 4 * 24
    before, after, tally, applied = run_ranks(2, one_update, run, "as always")[0]
    assert applied
    assert tally[..., -1].sum(-1).unique().tolist() == [192.0]  # every head has counted each token of the update once
    means, counts = moved(before[f"{HEADS}.means"], before[f"{HEADS}.counts"], tally[0], 0.9)
    torch.testing.assert_close(after[f"{HEADS}.means"], means)
    torch.testing.assert_close(after[f"{HEADS}.counts"], counts)
    assert (after[f"{HEADS}.means"] - before[f"{HEADS}.means"]).abs().max() > 0.1


@pytest.mark.parametrize("how", ["spike", "not finite"])
def test_an_update_that_is_skipped_moves_none(folder: Path, how: str) -> None:
    before, after, _, applied = run_ranks(1, one_update, routing_run(folder, zero=0), how)[0]
    assert not applied
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


def newest(run: RunConfig) -> Path:
    return run.output.path / "checkpoints" / (run.output.path / "checkpoints" / "latest").read_text()


def test_a_run_resumes_on_another_grid_with_its_centroids(folder: Path) -> None:
    complete = routing_run(folder, "complete", steps=8)
    parts = routing_run(folder, "parts", steps=8)
    on_ranks(complete, 1)
    on_ranks(parts, 1, halt_after=5)
    held = load_file(newest(parts) / BUFFERS)
    assert (held[f"{HEADS}.counts"] != 1).all()
    on_ranks(routing_run(folder, "parts", steps=8, tensor=2, data=2, zero=2), 4)
    expect_close(parts, complete)
    assert not torch.equal(exported_weights(parts)[f"{HEADS}.means"], held[f"{HEADS}.means"])


def test_resharded_and_exported_they_are_the_same(folder: Path) -> None:
    run = routing_run(folder, steps=4, tensor=2)
    on_ranks(run, 2)
    reshard(newest(run), folder / "resharded", tensor=4, data=1)
    expected = load_file(newest(run) / BUFFERS)
    found = run_checkpoint.read(folder / "resharded")
    transfer(found, model_folder, folder / "exported")
    loaded = model_folder.read(folder / "exported").load()
    for name, tensor in expected.items():
        assert torch.equal(found.weight(name), tensor)
        assert torch.equal(exported_weights(run)[name], tensor)
        assert torch.equal(loaded.get_buffer(name), tensor)


def test_a_run_can_start_with_a_model_and_its_centroids(folder: Path) -> None:
    first = routing_run(folder, "first", steps=8, output={"keep_every": 4})
    on_ranks(first, 1)
    transfer(run_checkpoint.read(first.output.path / "checkpoints" / "global_step4"), model_folder, folder / "model")
    second = routing_run(folder, "second", steps=8)
    changed = RunConfig.parse(second.as_data() | {"start": str(folder / "model")}, source="test")
    on_ranks(changed, 1)
    expected = [event["loss"] for event in metrics(first) if event["step"] > 4]
    assert [event["loss"] for event in metrics(second)] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("damage", ["missing", "of another shape"])
def test_a_checkpoint_without_its_centroids_is_refused(folder: Path, damage: str) -> None:
    run = routing_run(folder, steps=2)
    on_ranks(run, 1)
    path = newest(run) / BUFFERS
    if damage == "missing":
        path.unlink()
    else:
        save_file({name: tensor[:1] for name, tensor in load_file(path).items()}, path)
    reader = LogicalReader(newest(run), read_manifest(newest(run)))
    with pytest.raises(UserError, match=r"centroids.safetensors: does not hold the centroids of its model"):
        reader.weight(f"{HEADS}.means")
