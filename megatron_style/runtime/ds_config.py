"""The user's ds_config: plain DeepSpeed JSON, checked against the run file and completed from it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

from megatron_style.config.ds_file import read_ds_file, zero_stage
from megatron_style.config.errors import UserError
from megatron_style.config.run import RunConfig
from megatron_style.schedule.stages import Stage

DEFAULT_CLIP_NORM = 0.1
_BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_SECTIONS = {"zero_optimization": DeepSpeedZeroConfig, "fp16": DeepSpeedFP16Config, "bf16": DeepSpeedBF16Config}


def read_ds_config(path: Path | None) -> dict[str, Any]:
    data = read_ds_file(path)
    _check_sections(data, str(path))
    return data


def complete_ds_config(
    user: dict[str, Any], run: RunConfig, stages: Sequence[Stage], *, data_parallel: int
) -> dict[str, Any]:
    """What the engine is given. The batch triple is ours: accumulation is driven by hand, stage by stage."""
    source = str(run.deepspeed)
    _check_precision(user, source)
    for stage in stages:
        _check_batch(user, stage, data_parallel, source)
    completed = {key: value for key, value in user.items() if key not in _BATCH_KEYS}
    completed |= {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": clip_norm(user, run) if zero_stage(user) else 0.0,  # without ZeRO the engine clips
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": user.get("steps_per_print"),
    }
    if user.get("bf16", {}).get("enabled"):
        completed["bf16"] = {"check_grad_overflow": True} | user["bf16"]
    return completed


def _check_sections(data: dict[str, Any], source: str) -> None:
    for key, kind in _SECTIONS.items():
        if key not in data:
            continue
        if not isinstance(data[key], dict):
            raise UserError(f"{source}: {key} is {json.dumps(data[key])}; it must be an object, such as {{...}}")
        try:
            kind(**data[key])
        except ValueError as error:
            reason = " ".join(str(error).split("For further")[0].split())
            raise UserError(f"{source}: {key}: {reason}") from None
    clipping = data.get("gradient_clipping", "auto")
    if clipping != "auto" and not (isinstance(clipping, int | float) and clipping > 0):
        raise UserError(f"{source}: gradient_clipping is {json.dumps(clipping)}; it must be a number above 0")


def clip_norm(user: dict[str, Any], run: RunConfig) -> float:
    """In either file; in both only when they agree."""
    theirs, ours = user.get("gradient_clipping"), run.optimizer.clip_norm
    if theirs == "auto":
        theirs = None
    if theirs is not None and ours is not None and theirs != ours:
        raise UserError(
            f"{run.deepspeed}: gradient_clipping ({theirs}) fights optimizer.clip_norm ({ours}); remove one"
        )
    return float(next(value for value in (ours, theirs, DEFAULT_CLIP_NORM) if value is not None))


def check_one_home(user: dict[str, Any], run: RunConfig) -> None:
    """Optimizer and schedule live in one of the two files."""
    if "optimizer" in user and run.optimizer.name is not None:
        raise UserError(f"{run.deepspeed}: has an optimizer, and so has the run file (optimizer.name); remove one")
    if "scheduler" in user and run.optimizer.learning_rate is not None:
        raise UserError(
            f"{run.deepspeed}: has a scheduler, and so has the run file (optimizer.learning_rate); remove one"
        )
    if run.optimizer.learning_rate is None and "scheduler" not in user and "optimizer" not in user:
        raise UserError(
            "optimizer.learning_rate: missing; neither the run file nor the ds_config says how fast to learn"
        )


def _check_precision(user: dict[str, Any], source: str) -> None:
    half = next((key for key in ("fp16", "bf16") if user.get(key, {}).get("enabled")), None)
    if half == "fp16" and not get_accelerator().is_fp16_supported():
        device = get_accelerator().device_name()
        raise UserError(f"{source}: fp16 is not available on this machine's {device}; use bf16 or fp32")
    if half and zero_stage(user) == 0:
        raise UserError(
            f"{source}: {half} with zero_optimization.stage 0 computes a wrong gradient norm under tensor parallelism; "
            f"use stage 1, which costs nothing more"
        )


def _check_batch(user: dict[str, Any], stage: Stage, data_parallel: int, source: str) -> None:
    derived = dict(zip(_BATCH_KEYS, (stage.rows * data_parallel, stage.micro_rows, stage.accumulation), strict=True))
    for key, right in derived.items():
        given = user.get(key, "auto")
        if given not in ("auto", right):
            raise UserError(
                f"{source}: {key} is {given}, but stage {stage.index + 1} of the run ({stage.rows} rows of "
                f"{stage.segment_length} a rank, {stage.micro_rows} at once, {data_parallel} ranks) makes it {right}; "
                f"leave it out, and it is derived for each stage"
            )
