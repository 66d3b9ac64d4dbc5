"""`convert export`, `reshard` and `verify`, DeepSpeed's own tool, and signals, on checkpoints of real runs."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from safetensors.torch import load_file

from megatron_style import convert, evaluate
from megatron_style.checkpoint.manifest import read_manifest
from megatron_style.parallel.local_ranks import run_ranks
from megatron_style.train import main
from tests.support.launch import ROOT, plain_environment
from tests.support.resuming import UPDATE, expect_close, make_run, metrics, on_ranks
from tests.support.tiny import run_here

pytestmark = pytest.mark.slow


def command(name: str, *args: object, code: int = 0) -> dict[str, Any]:
    done = run_here({"convert": convert.main, "evaluate": evaluate.main}[name], *args, "--json")
    assert done.code == code, done.err
    return json.loads(done.out) if done.out else {"error": done.err}


@pytest.mark.parametrize(
    ("tensor", "data", "zero", "half"),
    [
        (1, 2, 1, True),
        (2, 1, 2, False),
        (1, 1, 0, False),
        pytest.param(2, 2, 3, False, marks=pytest.mark.sweep),
        pytest.param(2, 2, 2, True, marks=pytest.mark.sweep),
        pytest.param(2, 2, 3, True, marks=pytest.mark.sweep),
    ],
)
def test_export_gives_the_model_that_the_run_gave(folder: Path, tensor: int, data: int, zero: int, half: bool) -> None:
    run = make_run(folder, tensor=tensor, data=data, zero=zero, steps=4, half=half)
    on_ranks(run, tensor * data)
    command("convert", "export", run.output.path / "checkpoints" / "global_step4", "--output", folder / "exported")
    ours, again = (load_file(path / "model.safetensors") for path in (run.output.path / "model", folder / "exported"))
    assert all(torch.equal(ours[name], again[name]) for name in ours)
    result = command("convert", "verify", run.output.path / "checkpoints", folder / "exported")
    assert result["equal"] is True
    assert result["largest_nll_difference"] == 0
    flags = ("--data", folder / "valid", "--mode", "cached")
    on_run, on_model = (
        command("evaluate", path, *flags) for path in (run.output.path / "checkpoints", folder / "exported")
    )
    assert on_run["loss_nats"] == on_model["loss_nats"]


def test_verify_distinguishes_models(folder: Path) -> None:
    run = make_run(folder, steps=6, output={"save_every": 2})
    on_ranks(run, 1)
    steps = run.output.path / "checkpoints"
    result = command("convert", "verify", steps / "global_step4", steps / "global_step6", code=1)
    assert result["equal"] is False
    assert result["largest_weight_difference"] > 0


@pytest.mark.parametrize(
    ("zero", "half"),
    [(1, False), (2, True), (3, True)]
    + [pytest.param(*case, marks=pytest.mark.sweep) for case in ((2, False), (3, False))],
)
def test_deepspeeds_own_tool_finds_the_same_weights(folder: Path, zero: int, half: bool) -> None:
    """`zero_to_fp32`, at TP 1: it does not know tensor parallelism, nor DeepSpeed's optimizer for bf16 at ZeRO 1."""
    run = make_run(folder, data=2, zero=zero, steps=4, half=half)
    on_ranks(run, 2)
    theirs = get_fp32_state_dict_from_zero_checkpoint(str(run.output.path / "checkpoints"), tag="global_step4")
    ours = load_file(run.output.path / "model" / "model.safetensors")
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[name], ours[name]) for name in ours)


@pytest.mark.parametrize("half", [True, pytest.param(False, marks=pytest.mark.sweep)])
def test_reshard_writes_a_run_that_resumes_there(folder: Path, half: bool) -> None:
    whole = make_run(folder, "whole", data=2, zero=2, steps=8, half=half)
    on_ranks(whole, 2)
    run = make_run(folder, data=2, zero=2, steps=8, half=half)
    on_ranks(run, 2, halt_after=5)
    command("convert", "reshard", run.output.path, "--tensor", 2, "--data", 1, "--output", folder / "moved")
    manifest = read_manifest(folder / "moved" / "checkpoints" / "global_step5")
    assert manifest.grid == {"data": 1, "tensor": 2, "zero": 2}
    (folder / "moved" / "metrics.jsonl").write_text((run.output.path / "metrics.jsonl").read_text())
    moved = make_run(folder, "moved", tensor=2, zero=2, steps=8, half=half)
    on_ranks(moved, 2)
    expect_close(moved, whole, half=half)
    error = command(
        "convert", "reshard", run.output.path, "--tensor", 1, "--data", 5, "--output", folder / "no", code=2
    )
    assert f"must divide the {UPDATE} tokens of an update" in error["error"]


def test_a_damaged_checkpoint_is_not_exported(folder: Path) -> None:
    run = make_run(folder, steps=6)
    on_ranks(run, 1)
    file = next((run.output.path / "checkpoints" / "global_step6").glob("*optim_states.pt"))
    file.write_bytes(file.read_bytes()[:-1])
    told = command("convert", "export", run.output.path / "checkpoints", "--output", folder / "no", code=2)["error"]
    assert "is not complete" in told
    assert file.name in told
    assert not (folder / "no").exists()


@pytest.mark.sweep  # test_signals.py has Ctrl-C, and these under launchers
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_saves_and_leaves_with_75(folder: Path, number: signal.Signals) -> None:
    run = make_run(folder, steps=4000, output={"save_every": 3000, "evaluate_every": 3000})
    (folder / "run.yaml").write_text(json.dumps(run.as_data()))  # JSON is YAML
    words = [sys.executable, "-m", "megatron_style.train", str(folder / "run.yaml")]
    process = subprocess.Popen(words, cwd=ROOT, env=plain_environment(), stderr=subprocess.PIPE, text=True)
    while not (run.output.path / "metrics.jsonl").exists() or len(metrics(run)) < 3:
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(number)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 75
    step = metrics(run)[-1]["step"]
    assert f"stopped after step {step}: a signal asked for it" in told
    assert (run.output.path / "checkpoints" / "latest").read_text() == f"global_step{step}"


def test_a_run_leaves_when_its_time_is_over(folder: Path) -> None:
    run = make_run(folder, steps=4000, output={"save_every": 3000, "evaluate_every": 3000, "stop_after": "0.5s"})
    (folder / "run.yaml").write_text(json.dumps(run.as_data()))
    (done,) = run_ranks(1, run_here, main, folder / "run.yaml")
    assert done.code == 75
    assert "output.stop_after is over" in done.err
    assert 0 < metrics(run)[-1]["step"] < 4000
