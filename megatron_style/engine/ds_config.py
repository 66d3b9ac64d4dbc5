"""The user's ds_config: plain DeepSpeed JSON, checked against the run file and completed from it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from deepspeed.accelerator import get_accelerator
from deepspeed.comm.config import CommsLoggerConfig
from deepspeed.monitor.config import CometConfig, CSVConfig, TensorBoardConfig, WandbConfig
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

from megatron_style.base.errors import UserError
from megatron_style.config.ds_file import read_ds_file, zero_stage
from megatron_style.config.run import RunConfig
from megatron_style.schedule.stages import Stage

DEFAULT_CLIP_NORM = 0.1
_BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_MODELS = {
    "zero_optimization": DeepSpeedZeroConfig,
    "fp16": DeepSpeedFP16Config,
    "bf16": DeepSpeedBF16Config,
    "comms_logger": CommsLoggerConfig,
    "tensorboard": TensorBoardConfig,
    "csv_monitor": CSVConfig,
    "wandb": WandbConfig,
    "comet": CometConfig,
}
_PACKAGES = {"wandb": "wandb", "comet": "comet_ml", "tensorboard": "tensorboard"}  # needed by a monitor
# DeepSpeed logs what these ask for at level INFO.
_SPOKEN = (
    "steps_per_print",
    "wall_clock_breakdown",
    "memory_breakdown",
    "dump_state",
    "comms_logger",
    "flops_profiler",
)


def read_ds_config(path: Path | None) -> dict[str, Any]:
    data = read_ds_file(path)
    _check_sections(data, str(path))
    return data


def complete_ds_config(
    user: dict[str, Any], run: RunConfig, stages: Sequence[Stage], *, data_parallel: int
) -> dict[str, Any]:
    """Return the engine's ds_config. The batch triple is ours: accumulation is driven by hand, stage by stage."""
    source = str(run.deepspeed)
    _check_precision(user, source)
    for stage in stages:
        _check_batch(user, stage, data_parallel, source)
    completed = {key: value for key, value in user.items() if key not in _BATCH_KEYS} | _wandb(user, run)
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


def _wandb(user: dict[str, Any], run: RunConfig) -> dict[str, Any]:
    """Return the section of DeepSpeed's W&B monitor that `watch.wandb` of the run file stands for."""
    if run.watch.wandb is None:
        return {}
    if "wandb" in user:
        raise UserError(f"{run.deepspeed}: has wandb, and so has the run file (watch.wandb); remove one")
    if not _is_installed("wandb"):
        raise UserError("watch.wandb: needs the package wandb; `pip install wandb`, or remove the key")
    return {"wandb": {"enabled": True, "project": run.watch.wandb, "group": run.output.path.resolve().name}}


def _is_installed(package: str) -> bool:
    """True if the package can be imported. A folder of its name is none: W&B leaves its files in one, `wandb`."""
    spec = find_spec(package)
    return spec is not None and spec.origin is not None


def monitor_of(error: Exception) -> str | None:
    """Return the package of a monitor if the error is its own, for example without a login."""
    package = type(error).__module__.partition(".")[0]
    return package if package in _PACKAGES.values() else None


def speaks(user: dict[str, Any]) -> bool:
    """True if the user asked for a log of DeepSpeed's own."""
    return any(user.get(key) for key in _SPOKEN)


def explained(error: Exception, user: dict[str, Any], source: Path | None) -> UserError:
    """Return DeepSpeed's error as one line, with the key that it is about, if it names one."""
    reason = " ".join(f"{error}".split())[:300] or type(error).__name__
    key = next((path for path in _paths(user) if path.rpartition(".")[2] in reason), "")
    return UserError(f"{source}: {key + ': ' if key else ''}DeepSpeed refuses it: {reason}; change or remove the key")


def _paths(block: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the keys of a ds_config, the innermost first."""
    for key, value in block.items():
        if isinstance(value, dict):
            yield from _paths(value, f"{prefix}{key}.")
        yield f"{prefix}{key}"


def _check_sections(data: dict[str, Any], source: str) -> None:
    for key, kind in _MODELS.items():
        try:
            kind(**data.get(key, {}))
        except ValueError as error:
            reason = " ".join(str(error).split("For further")[0].split())
            raise UserError(f"{source}: {key}: {reason}") from None
    for key, package in _PACKAGES.items():
        if data.get(key, {}).get("enabled") and not _is_installed(package):
            raise UserError(f"{source}: {key} needs the package {package}; `pip install {package}`, or remove the key")
    clipping = data.get("gradient_clipping", "auto")
    if clipping != "auto" and not (isinstance(clipping, int | float) and clipping > 0):
        raise UserError(f"{source}: gradient_clipping is {json.dumps(clipping)}; it must be a number above 0")


def clip_norm(user: dict[str, Any], run: RunConfig) -> float:
    """Return the norm to clip at, from either file. Both may set it if they agree."""
    in_ds_config = user.get("gradient_clipping")
    in_run = run.optimizer.clip_norm
    if in_ds_config == "auto":
        in_ds_config = None
    if in_ds_config is not None and in_run is not None and in_ds_config != in_run:
        raise UserError(
            f"{run.deepspeed}: gradient_clipping ({in_ds_config}) conflicts with optimizer.clip_norm ({in_run}) of the "
            f"run file; keep one"
        )
    return float(next(value for value in (in_run, in_ds_config, DEFAULT_CLIP_NORM) if value is not None))


def check_one_home(user: dict[str, Any], run: RunConfig) -> None:
    """Refuse an optimizer or a schedule that both files set, or neither."""
    if "optimizer" in user and run.optimizer.name is not None:
        raise UserError(f"{run.deepspeed}: has an optimizer, and so has the run file (optimizer.name); remove one")
    if "scheduler" in user and run.optimizer.learning_rate is not None:
        raise UserError(
            f"{run.deepspeed}: has a scheduler, and so has the run file (optimizer.learning_rate); remove one"
        )
    if run.optimizer.learning_rate is None and "scheduler" not in user and "optimizer" not in user:
        raise UserError("optimizer.learning_rate: missing; set it, or a scheduler in the ds_config")


def _check_precision(user: dict[str, Any], source: str) -> None:
    half = next((key for key in ("fp16", "bf16") if user.get(key, {}).get("enabled")), None)
    if half == "fp16" and not get_accelerator().is_fp16_supported():
        device = get_accelerator().device_name()
        raise UserError(f"{source}: fp16 is not available on this machine's {device}; use bf16 or fp32")
    _check_bf16_optimizer(user, source)
    if half and zero_stage(user) == 0:
        raise UserError(
            f"{source}: {half} with zero_optimization.stage 0 computes a wrong gradient norm under tensor parallelism; "
            f"use stage 1, which costs nothing more"
        )


def _check_bf16_optimizer(user: dict[str, Any], source: str) -> None:
    """Refuse keys of ZeRO's reductions in the one case in which DeepSpeed replaces ZeRO's optimizer by another, which
    reduces gradients in its own way."""
    zero = user.get("zero_optimization", {})
    sums_in_fp32 = user.get("data_types", {}).get("grad_accum_dtype") == "fp32"
    offloads = zero.get("offload_optimizer", {}).get("device", "none") != "none"
    if not (user.get("bf16", {}).get("enabled") and sums_in_fp32 and zero_stage(user) == 1) or offloads:
        return
    for key in ("overlap_comm", "contiguous_gradients", "reduce_scatter", "reduce_bucket_size"):
        if key in zero:
            raise UserError(
                f"{source}: zero_optimization.{key} has no effect at stage 1 in bf16 with data_types.grad_accum_dtype "
                f"fp32; remove it, or use stage 2"
            )


def _check_batch(user: dict[str, Any], stage: Stage, data_parallel: int, source: str) -> None:
    derived = dict(zip(_BATCH_KEYS, (stage.rows * data_parallel, stage.micro_rows, stage.accumulation), strict=True))
    for key, right in derived.items():
        given = user.get(key, "auto")
        if given not in ("auto", right):
            raise UserError(
                f"{source}: {key} is {given}, but stage {stage.index + 1} of the run ({stage.rows} rows of "
                f"{stage.segment_length} per rank, {stage.micro_rows} at once, {data_parallel} ranks) makes it "
                f"{right}; leave it out, and it is derived for each stage"
            )
