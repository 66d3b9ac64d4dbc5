"""A run that was stopped, killed, damaged or moved to another grid resumes as if nothing had happened."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from safetensors import safe_open

from megatron_style.base.errors import RunFailed
from megatron_style.checkpoint.manifest import read_manifest
from megatron_style.config.run import RunConfig
from megatron_style.parallel.local_ranks import run_ranks
from megatron_style.train import train
from tests.support.killing import complete_steps
from tests.support.mutations import Payload
from tests.support.resuming import (
    UPDATE,
    damage,
    expect_bitwise,
    expect_close,
    make_run,
    metrics,
    on_ranks,
)
from tests.support.training import write_corpus

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("always_by_onednn")]
Stopped = Callable[[Path, int], RunConfig]
SPLITS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sequence": {"sequence": True},
    "host": {"cache": "host"},
    "sequence-host": {"sequence": True, "cache": "host"},
}
GRIDS = {"TP1DP1": (1, 1), "TP1DP2": (1, 2), "TP2DP1": (2, 1), "TP2DP2": (2, 2), "TP4DP1": (4, 1)}
DS_SGD = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}


@pytest.mark.parametrize(
    ("zero", "recompute", "optimizer", "half", "split", "grid"),
    [
        (3, True, "adamw", False, "plain", "TP1DP2"),
        (2, False, "adamw", True, "sequence-host", "TP2DP2"),
        pytest.param(1, True, "nag", False, "plain", "TP1DP2", marks=pytest.mark.sweep),
        *(
            pytest.param(*case, "TP2DP2", marks=pytest.mark.sweep)
            for case in (
                (1, True, "adamw", True, "plain"),
                (3, True, "adamw", False, "plain"),
                (0, True, "adamw", False, "plain"),
                (0, False, "nag", False, "plain"),
                (1, False, "nag", False, "plain"),
                (3, True, "adamw", True, "plain"),
                (2, True, "nag", True, "plain"),
                (2, False, "adamw", False, "plain"),
                (3, False, "nag", False, "plain"),
                (0, False, "nag", False, "sequence"),
                (1, True, "adamw", True, "sequence"),
                (1, False, "nag", False, "host"),
                (3, True, "adamw", True, "sequence-host"),
                (3, False, "nag", False, "sequence-host"),
            )
        ),
    ],
)
def test_a_stopped_run_equals_one_that_was_not(
    folder: Path, zero: int, recompute: bool, optimizer: str, half: bool, split: str, grid: str
) -> None:
    """10 steps = 3 + 3 + 4: in mid-epoch, across the switch at step 5, across the epoch's end at step 7. With
    dropout."""
    tensor, data = GRIDS[grid]
    settings: dict[str, Any] = {
        "steps": 10,
        "tensor": tensor,
        "data": data,
        "zero": zero,
        "recompute": recompute,
        "dropout": True,
        "half": half,
        "parallel": SPLITS[split],
    }
    settings["optimizer"] = {
        "name": optimizer,
        "weight_decay": 0.1,
        "learning_rate": {"peak": 0.3 if optimizer == "nag" else 0.01},
    }
    whole, parts = make_run(folder, "whole", **settings), make_run(folder, "parts", **settings)
    on_ranks(whole, tensor * data)
    for halt_after in (3, 3, None):
        on_ranks(parts, tensor * data, halt_after=halt_after)
    expect_bitwise(parts, whole)


@pytest.mark.parametrize("step", [6, 7])
def test_a_run_stopped_at_the_switch_records_everything_once(
    folder: Path, whole_12: RunConfig, stopped: Stopped, step: int
) -> None:
    run = stopped(folder, step)
    on_ranks(run, 1)
    expect_bitwise(run, whole_12)


ALL_MOVES = list(product(GRIDS, GRIDS, (1, 2, 3), ("fp32", "bf16")))
SUITE_MOVES = [("TP2DP1", "TP1DP2", 3, "fp32"), ("TP1DP2", "TP4DP1", 2, "bf16")]


@pytest.mark.parametrize(
    ("before", "after", "zero", "precision"),
    [pytest.param(*move, id="-".join(map(str, move))) for move in SUITE_MOVES]
    + [
        pytest.param(*move, id="-".join(map(str, move)), marks=pytest.mark.sweep)
        for move in ALL_MOVES
        if move not in SUITE_MOVES
    ],
)
def test_a_run_moves_to_another_grid(folder: Path, before: str, after: str, zero: int, precision: str) -> None:
    """Stopped at step 4 in mid-epoch: of 8, right at the switch of stages, for ZeRO 2, else of 10."""
    steps = 8 if zero == 2 else 10
    half = precision == "bf16"

    def at(grid: str, name: str) -> tuple[RunConfig, int]:
        tensor, data = GRIDS[grid]
        return make_run(folder, name, tensor=tensor, data=data, zero=zero, steps=steps, half=half), tensor * data

    whole, world = at(before, "whole")
    on_ranks(whole, world)
    moved, world = at(before, "moved")
    on_ranks(moved, world, halt_after=4)
    moved, world = at(after, "moved")
    on_ranks(moved, world)
    expect_close(moved, whole, half=half)


SPLIT_GRIDS = {"TP1DP2": (1, 2), "TP2DP1": (2, 1), "TP2DP2": (2, 2), "TP4DP1": (4, 1)}
INTO_AND_OUT = [
    pytest.param(before, split_before, after, split_after, zero, marks=pytest.mark.sweep)
    for before, after in product(("TP1DP2", "TP2DP2", "TP4DP1"), repeat=2)
    for split_before, split_after, zero in (("plain", "sequence-host", 3), ("sequence-host", "plain", 1))
]


@pytest.mark.parametrize(
    ("before", "split_before", "after", "split_after", "zero"),
    [
        ("TP1DP2", "host", "TP2DP1", "sequence", 2),
        pytest.param("TP2DP2", "host", "TP2DP2", "sequence", 2, marks=pytest.mark.sweep),
        pytest.param("TP2DP2", "plain", "TP4DP1", "sequence-host", 1, marks=pytest.mark.sweep),
        pytest.param("TP4DP1", "sequence", "TP1DP2", "host", 3, marks=pytest.mark.sweep),
        *INTO_AND_OUT,
    ],
)
def test_a_run_moves_into_and_out_of_what_is_split(
    folder: Path, before: str, split_before: str, after: str, split_after: str, zero: int
) -> None:
    def at(grid: str, split: str, name: str) -> tuple[RunConfig, int]:
        tensor, data = SPLIT_GRIDS[grid]
        parallel = SPLITS[split]
        return make_run(folder, name, tensor=tensor, data=data, zero=zero, steps=10, parallel=parallel), tensor * data

    whole, world = at(before, split_before, "whole")
    on_ranks(whole, world)
    moved, world = at(before, split_before, "moved")
    on_ranks(moved, world, halt_after=4)
    moved, world = at(after, split_after, "moved")
    on_ranks(moved, world)
    expect_close(moved, whole)


@pytest.mark.parametrize(
    ("zero_before", "zero_after", "half"),
    [
        (0, 1, False),
        (1, 3, True),
        pytest.param(3, 0, False, marks=pytest.mark.sweep),
        pytest.param(2, 1, True, marks=pytest.mark.sweep),
    ],
)
def test_a_run_moves_to_another_zero_stage_and_micro_batch(
    folder: Path, zero_before: int, zero_after: int, half: bool
) -> None:
    adam: dict[str, Any] = {"optimizer": {"name": "adamw", "eps": 1e-5, "weight_decay": 0.1}, "half": half}
    adam["optimizer"]["learning_rate"] = {"peak": 0.01}
    whole = make_run(folder, "whole", data=2, zero=zero_before, steps=8, **adam)
    on_ranks(whole, 2)
    on_ranks(make_run(folder, "moved", data=2, zero=zero_before, steps=8, **adam), 2, halt_after=5)
    moved = make_run(folder, "moved", data=2, zero=zero_after, steps=8, micro_tokens=96, **adam)
    on_ranks(moved, 2)
    expect_close(moved, whole, half=half)


def test_a_schedule_of_the_ds_config_moves_along(folder: Path) -> None:
    scheduler = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.1, "warmup_num_steps": 5}}

    def at(name: str, zero: int) -> RunConfig:
        ds = {"scheduler": scheduler}
        return make_run(folder, name, zero=zero, steps=6, optimizer={"learning_rate": None}, ds=ds)

    whole = at("whole", 1)
    on_ranks(whole, 1)
    on_ranks(at("moved", 1), 1, halt_after=2)
    on_ranks(at("moved", 1), 1, halt_after=1)
    moved = at("moved", 2)
    on_ranks(moved, 1)
    expect_close(moved, whole)


def test_with_another_update_size_every_token_is_still_read_once(folder: Path) -> None:
    """One rank becomes two with the same batch each: the lanes are cut anew from what is unread."""
    on_ranks(make_run(folder, data=1, steps=14), 1, halt_after=4)
    run = make_run(folder, data=2, update=2 * UPDATE, steps=14)
    on_ranks(run, 2)
    manifest = read_manifest(run.output.path / "checkpoints" / "global_step14")
    assert manifest.history == ((0, UPDATE), (4, 2 * UPDATE))
    tokens = [event["tokens"] for event in metrics(run)]
    # four updates of 192, one of 384, and what is left of the first epoch in a short one
    assert np.diff([0, *tokens])[:6].tolist() == [UPDATE] * 4 + [2 * UPDATE, 1200 - 4 * UPDATE - 2 * UPDATE]


@pytest.fixture(scope="module")
def whole_12(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """An undisturbed run of 12 steps on one rank."""
    folder = tmp_path_factory.mktemp("whole")
    write_corpus(folder)
    run = make_run(folder, steps=12)
    on_ranks(run, 1)
    return run


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Stopped:
    """Return a function that puts a run of 12 steps into a folder, stopped after some of them; each is trained once."""

    @cache
    def trained(steps: int) -> RunConfig:
        folder = tmp_path_factory.mktemp("stopped")
        write_corpus(folder)
        run = make_run(folder, steps=12)
        on_ranks(run, 1, halt_after=steps)
        return run

    def copied(folder: Path, steps: int) -> RunConfig:
        run = make_run(folder, steps=12)
        shutil.copytree(trained(steps).output.path, run.output.path)
        return run

    return copied


DAMAGED = product(
    ("manifest.json", "*optim_states.pt", "*model_states.pt", "caches*"), ("missing", "truncated", "flipped")
)
SUITE_DAMAGED = {
    ("manifest.json", "missing"),
    ("manifest.json", "flipped"),
    ("*optim_states.pt", "truncated"),
    ("*model_states.pt", "flipped"),
    ("caches*", "missing"),
}


@pytest.mark.parametrize(
    ("file", "how"),
    [pytest.param(*case, marks=() if case in SUITE_DAMAGED else pytest.mark.sweep) for case in DAMAGED],
)
def test_a_damaged_checkpoint_is_named_and_passed_over(
    folder: Path, whole_12: RunConfig, stopped: Stopped, how: str, file: str, capfd: pytest.CaptureFixture[str]
) -> None:
    run = stopped(folder, 11)
    newest = run.output.path / "checkpoints" / "global_step11"
    damage(next(newest.glob(file)), how)
    on_ranks(run, 1)
    assert "global_step11 is passed over" in capfd.readouterr().err
    expect_bitwise(run, whole_12)


def test_when_no_checkpoint_is_complete_nothing_is_overwritten(folder: Path, stopped: Stopped) -> None:
    run = stopped(folder, 3)
    damage(run.output.path / "checkpoints" / "global_step3" / "manifest.json", "truncated")
    before = metrics(run)
    with pytest.raises(Exception, match="none of its checkpoints is complete"):
        on_ranks(run, 1)
    assert metrics(run) == before


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"model": {"ffn_size": 64}}, "is of another model: its model.ffn_size is 32, not 64"),
        ({"model": {"positions": "relative"}}, "is of another model: its model.positions is infused, not relative"),
        ({"vocab_size": 40}, "its vocabulary has 37 tokens, not 40"),
        ({"optimizer": {"name": "adamw"}}, "was trained with nag"),
        ({"optimizer": {"name": None}, "ds": {"optimizer": DS_SGD}}, "was trained with nag, whose state .* to sgd"),
        ({}, "would skip or repeat tokens"),
    ],
)
def test_a_checkpoint_of_something_else_is_refused(
    folder: Path, stopped: Stopped, change: dict[str, Any], told: str
) -> None:
    stopped(folder, 3)
    if not change:
        write_corpus(folder, tokens=1300)  # the text has changed under the run
    with pytest.raises(Exception, match=told):
        on_ranks(make_run(folder, steps=12, **change), 1)


def test_a_shortened_compressed_memory_is_refused(folder: Path) -> None:
    """Its caches would have slots that this model has not."""
    memory = {"compressed": 4, "rate": 2}
    on_ranks(make_run(folder, steps=12, model={"memory": memory}), 1, halt_after=3)
    shortened = make_run(folder, steps=12, model={"memory": memory | {"compressed": 2}})
    with pytest.raises(
        Exception, match=r"another model: its model.memory is .*'compressed': 4.*, not .*'compressed': 2"
    ):
        on_ranks(shortened, 1)


def test_a_checkpoint_of_another_format_is_refused(folder: Path, stopped: Stopped) -> None:
    run = stopped(folder, 3)
    path = run.output.path / "checkpoints" / "global_step3" / "manifest.json"
    text = path.read_text().split("\n")[0].replace('"format": 2', '"format": 3')
    path.write_text(f"{text}\n{xxhash.xxh3_128(text.encode()).hexdigest()}\n")
    with pytest.raises(Exception, match="global_step3: has format 3; this version reads formats 1 and 2"):
        on_ranks(run, 1)


def test_caches_say_which_rows_they_are(folder: Path) -> None:
    run = make_run(folder, data=2, steps=6)
    on_ranks(run, 2)
    newest = run.output.path / "checkpoints" / "global_step6"
    told = [safe_open(path, framework="pt").metadata() for path in sorted(newest.glob("caches*"))]
    assert told == [{"global_rows": "0..4"}, {"global_rows": "4..8"}]  # 192 tokens in rows of 24


def test_old_checkpoints_are_removed_and_some_are_kept_for_good(folder: Path) -> None:
    run = make_run(folder, steps=24, output={"save_every": 2, "keep_last": 2, "keep_every": 8, "evaluate_every": None})
    on_ranks(run, 1)
    names = sorted(path.name for path in (run.output.path / "checkpoints").iterdir() if path.is_dir())
    assert names == sorted(f"global_step{step}" for step in (8, 16, 22, 24))


def in_little_space(run: RunConfig) -> None:
    import resource

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    with pytest.raises(RunFailed, match=r"could not be written .* the checkpoint of step 4 is unchanged"):
        train(run)


def test_a_full_disk_stops_the_run_and_leaves_what_was_there(
    folder: Path, whole_12: RunConfig, stopped: Stopped
) -> None:
    run = stopped(folder, 4)
    run_ranks(1, in_little_space, run)
    assert (run.output.path / "checkpoints" / "latest").read_text() == "global_step4"
    left = [path for path in (run.output.path / "checkpoints").glob("*.partial/*") if path.suffix != ".py"]
    assert not [path for path in left if path.stat().st_size > 10_000]  # so that the disk has room again
    on_ranks(run, 1)
    expect_bitwise(run, whole_12)


def test_saving_over_a_checkpoint_keeps_the_new_one(folder: Path, whole_12: RunConfig) -> None:
    """The newest is damaged, so the run resumes one step earlier, reaches its step again and replaces it."""
    run = make_run(folder, steps=12, output={"save_every": 1})
    on_ranks(run, 1, halt_after=8)
    damage(next((run.output.path / "checkpoints" / "global_step8").glob("*optim_states.pt")), "flipped")
    on_ranks(run, 1)
    assert [event["loss"] for event in metrics(run)] == [event["loss"] for event in metrics(whole_12)]
    names = sorted(path.name for path in (run.output.path / "checkpoints").iterdir() if path.is_dir())
    assert names == ["global_step11", "global_step12"]


def test_damaged_checkpoints_do_not_count_among_those_that_are_kept(folder: Path) -> None:
    """They are newer than the one that is written next, which must stay, as must the one that was resumed."""
    run = make_run(folder, steps=12, output={"save_every": 4, "keep_last": 3, "evaluate_every": None})
    for steps in (4, 2, 1):
        on_ranks(run, 1, halt_after=steps)
    for step in (6, 7):
        damage(run.output.path / "checkpoints" / f"global_step{step}" / "manifest.json", "truncated")
    fewer = make_run(folder, steps=12, output={"save_every": 4, "keep_last": 2, "evaluate_every": None})
    on_ranks(fewer, 1, halt_after=1)
    assert complete_steps(run.output.path / "checkpoints") == [5, 4]
    on_ranks(fewer, 1, halt_after=4)
    names = sorted(path.name for path in (run.output.path / "checkpoints").iterdir() if path.is_dir())
    assert names == ["global_step6", "global_step8", "global_step9"]  # the first was sound: stage 1 ended there


def test_exchanged_checkpoints_are_damaged(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Each is complete, but not what its name says: its weights would be taken for another step's."""
    run = make_run(folder, steps=12, output={"save_every": 2, "keep_last": 3})
    on_ranks(run, 1, halt_after=6)
    saved = run.output.path / "checkpoints"
    for old, new in (("global_step4", "spare"), ("global_step6", "global_step4"), ("spare", "global_step6")):
        (saved / old).rename(saved / new)
    on_ranks(run, 1, halt_after=5)
    told = capfd.readouterr().err
    assert "global_step6 is passed over: its manifest is of step 4" in told
    assert "global_step4 is passed over: its manifest is of step 6" in told
    assert "resuming at step 2 " in told


def test_what_else_lies_next_to_checkpoints_is_left_alone(folder: Path) -> None:
    run = make_run(folder, steps=12, output={"save_every": 1})
    others = ["global_step4.bak1", "global_step²", "global_step4.old.partial", "global_step007", "notes"]
    for name in others:
        (run.output.path / "checkpoints" / name).mkdir(parents=True)
    on_ranks(run, 1, halt_after=3)
    on_ranks(run, 1)
    left = {path.name for path in (run.output.path / "checkpoints").iterdir() if path.is_dir()}
    assert left == {"global_step11", "global_step12", *others}


def poison(checkpoint: Path, file: Path, target: Path) -> None:
    """Put a payload into a file of a checkpoint, and make its manifest agree."""
    state = torch.load(file, weights_only=False)
    torch.save(state | {"extra": Payload(target, "system")}, file)
    manifest = checkpoint / "manifest.json"
    data = json.loads(manifest.read_text().split("\n")[0])
    data["files"][file.name] = [file.stat().st_size, xxhash.xxh3_128(file.read_bytes()).hexdigest()]
    text = json.dumps(data)
    manifest.write_text(f"{text}\n{xxhash.xxh3_128(text.encode()).hexdigest()}\n")


@pytest.mark.parametrize("zero", [0, 1, pytest.param(2, marks=pytest.mark.sweep), 3])
@pytest.mark.parametrize("pattern", ["*optim_states.pt", "*model_states.pt"])
def test_a_strangers_checkpoint_runs_nothing(folder: Path, zero: int, pattern: str) -> None:
    """Neither on its own grid nor on another."""
    run = make_run(folder, zero=zero, steps=4)
    on_ranks(run, 1, halt_after=1)
    checkpoint = run.output.path / "checkpoints" / "global_step1"
    files = sorted(checkpoint.glob(pattern))
    if not files:
        assert zero == 0  # one file holds all
        return
    poison(checkpoint, files[0], folder / "executed")
    for stage in (zero, 1 if zero != 1 else 2):
        with pytest.raises(Exception, match="holds more than tensors and plain values, so it is not loaded"):
            on_ranks(make_run(folder, zero=stage, steps=4), 1)
    assert not (folder / "executed").exists()
