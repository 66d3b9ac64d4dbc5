"""Checkpoints of the reference: round trips, including the optimizer, and training that continues from them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_style.config.run import RunConfig
from megatron_style.engine.build import build_engine
from megatron_style.engine.session import distributed_session
from megatron_style.formats import fairseq, model_folder
from megatron_style.formats.source import ModelSource, parameters_of
from megatron_style.formats.start import open_start
from megatron_style.formats.transfer import transfer
from megatron_style.parallel.local_ranks import run_ranks
from megatron_style.schedule.learning_rate import learning_rate_at
from megatron_style.schedule.stages import StageSchedule
from tests.support.oracle import ORACLE, needs_oracle, read_blocks, recorded, recorded_tokens, reference_loss
from tests.support.tiny import tiny_config, tiny_model, weights_of

STAGE_1 = ORACLE / "ckpt" / "c_stage1.pt"


def load(path: Path) -> dict[str, Any]:
    with torch.serialization.safe_globals([argparse.Namespace]):
        state: dict[str, Any] = torch.load(path, weights_only=True)
    return state


def trained_source(kind: str, folder: Path, **model: Any) -> ModelSource:
    """A small model with some momentum."""
    config = tiny_config(kind, **model)
    training = {"optimizer": "nag", "learning_rate": 0.0123, "momentum": 0.95, "epoch": 3}
    config = type(config).parse(config.as_data() | {"step": 77, "training": training}, source="test")
    weights = weights_of(tiny_model(config, torch.float32))
    generator = torch.Generator().manual_seed(5)
    momentum = {name: torch.randn(weight.shape, generator=generator) for name, weight in weights.items()}
    return ModelSource(
        folder, config, weights.__getitem__, lambda: None, lambda name: {"momentum_buffer": momentum[name]}
    )


def expect_same(one: ModelSource, other: ModelSource) -> None:
    assert one.config == other.config
    assert one.state is not None
    assert other.state is not None
    for name in parameters_of(one.config):
        assert torch.equal(one.weight(name), other.weight(name)), name
        ours, theirs = (source.state(name)["momentum_buffer"] for source in (one, other))
        assert torch.equal(ours.float(), theirs.float()), name


@pytest.mark.parametrize("kind", ["adaptive", "tied", "untied"])
@pytest.mark.parametrize("positions", ["infused", "added"])
def test_ours_to_theirs_and_back_is_the_same_to_the_bit(tmp_path: Path, kind: str, positions: str) -> None:
    cache = positions == "infused"
    source = trained_source(kind, tmp_path, positions=positions, cache=cache)
    certificate = transfer(source, fairseq, tmp_path / "model.pt")
    assert certificate.source_digest == certificate.output_digest
    assert certificate.largest_nll_difference == 0
    expect_same(source, fairseq.read(tmp_path / "model.pt"))


@needs_oracle
@pytest.mark.parametrize("name", ["a_final", "b_final", "c_stage1", "d_final"])
def test_theirs_to_ours_and_back_holds_the_same_bytes(tmp_path: Path, name: str) -> None:
    original = load(ORACLE / "ckpt" / f"{name}.pt")
    transfer(fairseq.read(ORACLE / "ckpt" / f"{name}.pt"), model_folder, tmp_path / "ours")
    transfer(model_folder.read(tmp_path / "ours"), fairseq, tmp_path / "again.pt")
    again = load(tmp_path / "again.pt")
    assert again["model"].keys() == original["model"].keys()
    for key, tensor in original["model"].items():
        assert (again["model"][key].dtype, again["model"][key].shape) == (tensor.dtype, tensor.shape), key
        if not key.endswith("_float_tensor"):  # says where the module is, not what it computes
            assert torch.equal(again["model"][key], tensor), key
    for setting, value in vars(again["args"]).items():
        assert getattr(original["args"], setting, value) == value or setting == "max_tokens", setting
    assert again["optimizer_history"][-1]["num_updates"] == original["optimizer_history"][-1]["num_updates"]


@needs_oracle
def test_the_optimizer_survives_the_round_trip(tmp_path: Path) -> None:
    original = load(STAGE_1)
    transfer(fairseq.read(STAGE_1), model_folder, tmp_path / "ours")
    transfer(model_folder.read(tmp_path / "ours"), fairseq, tmp_path / "again.pt")
    again = load(tmp_path / "again.pt")
    theirs, ours = (state["last_optimizer_state"] for state in (original, again))
    assert ours["state"].keys() == theirs["state"].keys()
    for index, state in theirs["state"].items():
        assert torch.equal(ours["state"][index]["momentum_buffer"].float(), state["momentum_buffer"]), index
    for key in ("lr_old", "momentum", "weight_decay", "params"):
        assert ours["param_groups"][0][key] == theirs["param_groups"][0][key]
    assert again["extra_state"]["train_iterator"]["epoch"] == original["extra_state"]["train_iterator"]["epoch"]


@needs_oracle
def test_one_flat_buffer_of_half_precision_training_is_cut_up(tmp_path: Path) -> None:
    """fairseq's fp16 optimizer keeps all momentum in one tensor, in the order of the parameters."""
    state = load(STAGE_1)
    optimizer = state["last_optimizer_state"]
    flat = torch.cat(
        [optimizer["state"][i]["momentum_buffer"].flatten() for i in optimizer["param_groups"][0]["params"]]
    )
    half = {name: tensor.half() if tensor.is_floating_point() else tensor for name, tensor in state["model"].items()}
    optimizer |= {"state": {0: {"momentum_buffer": flat}}, "loss_scale": 128.0}
    optimizer["param_groups"][0]["params"] = [0]
    torch.save(state | {"model": half}, tmp_path / "half.pt")
    flat_source, source = fairseq.read(tmp_path / "half.pt"), fairseq.read(STAGE_1)
    assert flat_source.state is not None
    assert source.state is not None
    for name in parameters_of(source.config):
        assert torch.equal(flat_source.state(name)["momentum_buffer"], source.state(name)["momentum_buffer"]), name
        assert torch.equal(flat_source.weight(name), source.weight(name).half().float()), name


def test_a_file_in_the_old_format_is_read_too(tmp_path: Path) -> None:
    source = trained_source("adaptive", tmp_path)
    transfer(source, fairseq, tmp_path / "new.pt")
    torch.save(load(tmp_path / "new.pt"), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    expect_same(source, fairseq.read(tmp_path / "old.pt"))


# On with the training


def run_c(folder: Path, start: Path) -> RunConfig:
    """The reference's run c, whose first stage has been done."""
    data = {
        "model": fairseq.read(STAGE_1).config.model.as_data(),
        "data": {"train": str(ORACLE / "data" / "train"), "valid": str(ORACLE / "data" / "valid"),
                 "tokens_per_batch": 1024},
        "stages": [{"segment_length": 16, "steps": 192}, {"segment_length": 32, "steps": 108}],
        "optimizer": {"learning_rate": {"peak": 0.3, "floor": 1e-4, "warmup_from": 1e-7, "warmup_steps": 30}},
        "output": {"path": str(folder / "run")},
        "start": str(start),
    }  # fmt: skip
    return RunConfig.parse(data, source="run c")


def follow_c2(run: RunConfig, updates: list[dict[str, Any]]) -> list[tuple[float, float, float]]:
    """Learning rate, loss and gradient norm of the reference's batches, on an engine that `start` has filled."""
    tokens, found = recorded_tokens("train"), []
    with distributed_session(tensor=1) as topology:
        origin = open_start(run, topology)
        schedule = StageSchedule(run, corpus_tokens=len(tokens), data_parallel=1, history=origin.history)
        engine = build_engine(run, schedule, 9848, topology)
        progress = origin.load(engine, schedule)
        assert schedule.plan(progress.step).opens_lanes
        cache = engine.model.empty_memory(32, 32)
        for update in updates:
            loss, cache = reference_loss(engine.model, *read_blocks(tokens, update["ids"], 32), cache)
            engine.accumulate(loss / update["ntokens"], is_last=True)
            rate = learning_rate_at(update["update"], run.optimizer.learning_rate, schedule.total_steps)
            assert rate is not None
            found.append((rate, loss.item(), float(engine.update(rate).grad_norm)))
    return [(progress.step, 0, 0), *found]


@needs_oracle
def test_training_continues_as_the_references_did(tmp_path: Path) -> None:
    """Up to the sixth update, where float32 rounding decides on which side of a ReLU's kink a number falls."""
    transfer(fairseq.read(STAGE_1), model_folder, tmp_path / "ours")
    updates = recorded("train/c2.json")["updates"][:5]
    (step, _, _), *found = run_ranks(1, follow_c2, run_c(tmp_path, tmp_path / "ours"), updates)[0]
    assert step == updates[0]["update"] == 192
    for update, (rate, loss, norm) in zip(updates, found, strict=True):
        assert rate == pytest.approx(update["lr"], rel=1e-12)
        assert loss == pytest.approx(update["loss_sum_nats"], rel=1e-5)
        assert norm == pytest.approx(update["gnorm"], rel=1e-5)
