"""Every setting of a ds_config is honoured, with a visible effect, or refused in one line.

Each case is a run of `train` in a process forked from this one, so that nothing is imported again."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_style.base.command import run_command
from megatron_style.config.run_file import load_run
from megatron_style.train import train
from tests.support.small_run import losses, write_small_run
from tests.support.training import write_ds_config

pytestmark = pytest.mark.slow
ADAMW = {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}}
COSINE = {"type": "WarmupCosineLR", "params": {"total_num_steps": 4, "warmup_num_steps": 1}}
OWN_SCHEDULE = {"learning_rate": None}  # the run file leaves it to the ds_config


def start(path: Path, log: Path, *settings: str) -> int:
    """Run `train` as if it had been typed; its exit code, with all it said in `log`."""

    def body() -> None:
        sys.stdout = sys.stderr = log.open("w", buffering=1)
        os.dup2(sys.stderr.fileno(), 1)
        os.dup2(sys.stderr.fileno(), 2)
        run_command(lambda: train(load_run(path, settings)))

    process = multiprocessing.get_context("fork").Process(target=body)
    process.start()
    process.join(300)
    assert process.exitcode is not None
    return process.exitcode


def run_with(folder: Path, ds: dict[str, Any], *settings: str, **sections: Any) -> tuple[int, str]:
    ds_path = write_ds_config(folder, **ds)
    path = write_small_run(folder, ranks=1, deepspeed=str(ds_path), **sections)
    code = start(path, folder / "log", *settings)
    return code, (folder / "log").read_text()


def zero(stage: int, **more: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **more}}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "compile": ({"compile": {"deepcompile": True}}, "compile: torch.compile is not faster here"),
    "activation_checkpointing": ({"activation_checkpointing": {"cpu_checkpointing": True}}, "parallel.recompute"),
    "misspelt in a block": (zero(1, overlap_com=True), "zero_optimization.overlap_com: .*'overlap_comm'"),
    "misspelt in another": ({"flops_profiler": {"enabled": True, "profil_step": 1}}, "profil_step: .*'profile_step'"),
    "misspelt in a third": ({"checkpoint": {"tag_validaton": "Warn"}}, "tag_validaton: .*'tag_validation'"),
    "misspelt deep inside": (zero(1, offload_optimizer={"devise": "cpu"}), "offload_optimizer.devise: .*'device'"),
    "offload_param at stage 2": (zero(2, offload_param={"device": "cpu"}), "offload_param.device has no effect at"),
    "stage3_* at stage 1": (zero(1, stage3_max_live_parameters=9), "stage3_max_live_parameters has no effect at"),
    "cosine without a rate": ({"scheduler": COSINE}, "scheduler.type WarmupCosineLR multiplies the learning rate"),
    "autotuning": ({"autotuning": {"enabled": True}}, "autotuning: it would end the run"),
    "load_universal": ({"checkpoint": {"load_universal": True}}, "checkpoint.load_universal: the run could not resume"),
    "elastic_checkpoint": (zero(1, elastic_checkpoint=True), "elastic_checkpoint: such a checkpoint cannot be loaded"),
    "amp": ({"amp": {"enabled": True}}, "amp: DeepSpeed 0.19 has removed it"),
    "elasticity": ({"elasticity": {"enabled": True}}, "elasticity: DeepSpeed 0.19 has removed it"),
    "sparse_gradients": ({"sparse_gradients": True}, "sparse_gradients: DeepSpeed 0.19 has removed it"),
    "torch_autocast": ({"torch_autocast": {"enabled": True}}, "torch_autocast: use bf16 or fp16"),
    "checkpoint.writer": ({"checkpoint": {"writer": {"type": "fast"}}}, "checkpoint.writer: it needs pipeline"),
    "stage auto": (zero(1) | {"zero_optimization": {"stage": "auto"}}, 'stage is "auto"; it must be 0, 1, 2 or 3'),
    "bucket auto": (zero(1, reduce_bucket_size="auto"), 'reduce_bucket_size is "auto", which another trainer'),
    "no check of overflow": (zero(1) | {"bf16": {"enabled": True, "check_grad_overflow": False}}, "check_grad_overf"),
    "unknown optimizer": ({"optimizer": {"type": "Sgdd", "params": {}}}, "optimizer.type is \"Sgdd\"; use one of"),
    "removed optimizer": ({"optimizer": {"type": "OneBitAdam"}}, "optimizer.type is \"OneBitAdam\"; use one of"),
    "muon": ({"optimizer": {"type": "Muon", "params": {"lr": 0.1}}}, "optimizer.type Muon: DeepSpeed computes it"),
    "wandb is not installed": ({"wandb": {"enabled": True}}, "wandb needs the package wandb"),
    "comet is not installed": ({"comet": {"enabled": True}}, "comet needs the package comet_ml"),
    "granularity": (zero(3, stage3_module_granularity_threshold=1000), "stage3_module_granularity_threshold: weights"),
    "round robin": (zero(1, round_robin_gradients=True), "round_robin_gradients: DeepSpeed's map of its weights"),
    "nvme": (zero(3, offload_optimizer={"device": "nvme"}), "offload_optimizer.device: offloading to NVMe"),
    "wrong parameter": (
        {"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentun": 0.9}}},
        "optimizer.params.momentun: DeepSpeed refuses it: .*unexpected keyword argument",
    ),
    "wrong type": (zero(1, reduce_bucket_size="many"), "zero_optimization: .*reduce_bucket_size"),
    "both halves": (zero(1) | {"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "fp16"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused_in_one_line(tmp_path: Path, case: str) -> None:
    ds, told = REFUSED[case]
    optimizer = OWN_SCHEDULE if "scheduler" in ds else {}
    code, log = run_with(tmp_path, ds, optimizer=optimizer)
    lines = [line for line in log.splitlines() if line.startswith("error: ")]
    assert code == 2, log
    assert len(lines) == 1
    assert "Traceback" not in log
    assert str(tmp_path / "ds_config.json") in lines[0]
    assert not (tmp_path / "run" / "checkpoints").exists()
    assert re.search(told, lines[0]), lines[0]


@pytest.mark.parametrize(
    ("ds", "seen"),
    [
        ({"steps_per_print": 2}, "step=4, skipped=0, lr="),
        ({"dump_state": True}, "DeepSpeedEngine configuration"),
        ({"wall_clock_breakdown": True}, "fwd: "),
        pytest.param({"memory_breakdown": True}, "Engine before step", marks=pytest.mark.sweep),  # it takes a minute
        (zero(1) | {"comms_logger": {"enabled": True}}, "all_reduce"),
        ({"flops_profiler": {"enabled": True, "profile_step": 2}}, "DeepSpeed Flops Profiler"),
    ],
    ids=lambda each: next(reversed(each)) if isinstance(each, dict) else "",
)
def test_what_is_to_be_shown_is_shown(tmp_path: Path, ds: dict[str, Any], seen: str) -> None:
    code, log = run_with(tmp_path, ds)
    assert code == 0, log
    assert seen in log


def test_without_such_a_key_deepspeed_is_silent(tmp_path: Path) -> None:
    code, log = run_with(tmp_path, zero(1))
    assert code == 0, log
    assert "INFO" not in log


def test_a_cosine_with_a_rate_of_its_own_learns(tmp_path: Path) -> None:
    code, log = run_with(tmp_path, {"optimizer": ADAMW, "scheduler": COSINE}, optimizer=OWN_SCHEDULE)
    assert code == 0, log
    events = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    rates = [event["learning_rate"] for event in events if event["kind"] == "train"]
    assert max(rates) > 0.001


def test_another_optimizer_on_resume_is_refused(tmp_path: Path) -> None:
    sgd = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}
    code, log = run_with(tmp_path, {"optimizer": ADAMW}, "output.stop_after=0s")
    assert code == 75, log
    code, log = run_with(tmp_path, {"optimizer": sgd})
    assert code == 2
    assert "was trained with adamw, whose state is of no use to sgd" in log


@pytest.mark.parametrize(
    "kind", ["SGD", "AdamW", *(pytest.param(kind, marks=pytest.mark.sweep) for kind in ("NAdam", "RAdam", "RMSprop"))]
)
def test_an_optimizer_of_the_ds_config_trains(tmp_path: Path, kind: str) -> None:
    params = {"lr": 0.01} | ({"torch_adam": True} if kind == "AdamW" else {})
    code, log = run_with(tmp_path, zero(1) | {"optimizer": {"type": kind, "params": params}})
    assert code == 0, log
    assert len(losses(tmp_path)) == 4


def test_what_asks_for_nothing_is_left_out(tmp_path: Path) -> None:
    off = {"amp": {"enabled": False}, "elasticity": {"enabled": False}, "sparse_gradients": False}
    off |= {
        "autotuning": {"enabled": False},
        "checkpoint": {"load_universal": False},
        "zero_allow_untested_optimizer": True,
    }
    code, log = run_with(tmp_path, off | zero(1, round_robin_gradients=False, elastic_checkpoint=False))
    assert code == 0, log
