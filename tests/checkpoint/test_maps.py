"""The map of a checkpoint matches the engine, in every precision and for every group of parameters."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
import xxhash
from safetensors.torch import load_file

from megatron_style.base.errors import RunFailed
from megatron_style.checkpoint import proof
from megatron_style.checkpoint.proof import compared
from megatron_style.config.run import RunConfig
from megatron_style.engine.zero_layout import fragments
from megatron_style.formats.formats import open_model
from megatron_style.parallel.local_ranks import run_ranks
from megatron_style.parallel.sharding import Fragment, Layout
from megatron_style.train import train
from tests.support.resuming import expect_close, make_run, metrics, on_ranks

ADAMW = {"name": "adamw", "weight_decay": 0.1, "learning_rate": {"peak": 0.01}}


@pytest.mark.slow
@pytest.mark.parametrize("zero", [*(pytest.param(zero, marks=pytest.mark.sweep) for zero in (1, 2)), 3])
def test_a_bf16_run_resumes_exactly_and_moves_twice(folder: Path, zero: int) -> None:
    """DP2 -> DP2, bit for bit; DP2 -> DP1 -> TP2, within the rounding of bf16; then exported."""
    settings: dict[str, Any] = {"zero": zero, "steps": 8, "half": True, "optimizer": ADAMW}
    whole = make_run(folder, "whole", data=2, **settings)
    on_ranks(whole, 2)
    run = make_run(folder, data=2, **settings)
    on_ranks(run, 2, halt_after=2)
    on_ranks(run, 2, halt_after=2)
    assert metrics(run) == metrics(whole)[:4]
    on_ranks(make_run(folder, data=1, **settings), 1, halt_after=2)
    run = make_run(folder, tensor=2, **settings)
    on_ranks(run, 2)
    expect_close(run, whole, half=True)
    exported, given = open_model(run.output.path), load_file(run.output.path / "model" / "model.safetensors")
    assert all(torch.equal(exported.weight(name), weight) for name, weight in given.items())


@pytest.mark.slow
def test_a_manifest_that_leaves_out_the_precision_is_read(folder: Path) -> None:
    """As the first version wrote it for bf16: the files it names are not there under these names."""
    run = make_run(folder, data=2, steps=4, half=True)
    on_ranks(run, 2)
    path = run.output.path / "checkpoints" / "global_step4" / "manifest.json"
    data = json.loads(path.read_text().split("\n")[0])
    data["fragments"] = {name.removeprefix("bf16_"): found for name, found in data["fragments"].items()}
    text = json.dumps(data)
    path.write_text(f"{text}\n{xxhash.xxh3_128(text.encode()).hexdigest()}\n")
    exported, given = open_model(run.output.path), load_file(run.output.path / "model" / "model.safetensors")
    assert all(torch.equal(exported.weight(name), weight) for name, weight in given.items())


def in_one_group(engine: Any, *, data_rank: int) -> list[Fragment]:
    """The map as it was when there was one group only."""
    return [Fragment(f.param, 0, f.start, f.count, f.offset) for f in fragments(engine, data_rank=data_rank)]


def scrambled(engine: Any, *, data_rank: int) -> list[Fragment]:
    """As DeepSpeed's own map with `round_robin_gradients`: right names and counts in the wrong places."""
    found = fragments(engine, data_rank=data_rank)
    pair = next((a, b) for a in found for b in found if a.count == b.count and a.start < b.start)
    turned = {pair[0]: pair[1], pair[1]: pair[0]}
    return [Fragment(f.param, f.group, turned.get(f, f).start, f.count, f.offset) for f in found]


def with_a_gap(engine: Any, *, data_rank: int) -> list[Fragment]:
    return fragments(engine, data_rank=data_rank)[1:]


def fail_to_save(run: RunConfig, wrong: Any, told: str) -> None:
    with patch("megatron_style.engine.state.fragments", wrong), pytest.raises(RunFailed, match=told):
        train(run)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (in_one_group, "optim_states.pt has other numbers for .* than the model"),
        (scrambled, "optim_states.pt has other numbers for .* than the model"),
        (with_a_gap, "the map has .* of tensor rank 0 up to element 0 only"),
    ],
)
@pytest.mark.parametrize("zero", [1, pytest.param(3, marks=pytest.mark.sweep)])
def test_a_checkpoint_with_a_wrong_map_is_never_seen(folder: Path, wrong: Any, told: str, zero: int) -> None:
    """Those before it stay."""
    run = make_run(folder, steps=6, zero=zero, optimizer=ADAMW, half=True)
    on_ranks(run, 1, halt_after=2)
    run_ranks(1, fail_to_save, run, wrong, rf"checkpoint of step 3 would be wrong, so it was not kept: .*{told}")
    assert [path.name for path in (run.output.path / "checkpoints").glob("global*")] == ["global_step2"]


def test_a_large_model_is_compared_in_turns() -> None:
    parameters = {f"p{i}": Layout((10, 10)) for i in range(20)}
    assert sorted(compared(parameters, 7, ways=1)) == sorted(parameters)
    turns = [compared(parameters, step, ways=1, most=500) for step in range(0, 1000, 20)]
    assert {len(turn) for turn in turns} == {5}
    assert set().union(*turns) == set(parameters)
    brief = [compared(parameters, step, ways=1, briefly=True) for step in range(0, 20000, 20)]
    assert {len(turn) for turn in brief} == {1}
    assert set().union(*brief) == set(parameters)


def test_a_rank_that_holds_padding_only_has_nothing_to_compare() -> None:
    """It still takes part: ZeRO 3 gathers every parameter from all ranks."""
    asked: list[str] = []
    engine = SimpleNamespace(working_weight=lambda name, *_: (asked.append(name), torch.zeros(0))[1])
    assert proof.take_fingerprints(cast(Any, engine), [], ["a"]) == {}
    assert asked == ["a"]


def test_numbers_are_compared_as_the_model_reads_them() -> None:
    """In their precision, and with one NaN, of which devices have different ones."""
    weights = torch.tensor([1.0, torch.nan, torch.inf, -torch.inf, 1e-3, 2.0])
    fragment = Fragment("a", group=0, start=1, count=5, offset=0)
    engine = SimpleNamespace(working_weight=lambda *_: weights[1:].bfloat16())
    expected = proof.take_fingerprints(cast(Any, engine), [fragment], ["a"])
    assert proof.difference([{"weight": weights}], [fragment], expected, "file") is None
    for wrong in (weights + 1, weights.nan_to_num(0), -weights):
        found = proof.difference([{"weight": wrong}], [fragment], expected, "file")
        assert found == "file has other numbers for a than the model"
