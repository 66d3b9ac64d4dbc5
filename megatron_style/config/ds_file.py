"""The user's ds_config as a file: JSON with keys that DeepSpeed knows. Values are checked where used."""

from __future__ import annotations

import difflib
import json
from pathlib import Path
from typing import Any

from megatron_style.config.errors import UserError

_KNOWN_KEYS = frozenset(
    """
    activation_checkpointing aio amp autotuning bf16 checkpoint comet comms_logger communication_data_type compile
    csv_monitor data_types disable_allgather dump_state elasticity flops_profiler fp16 gradient_accumulation_steps
    gradient_clipping gradient_predivide_factor memory_breakdown optimizer prescale_gradients scheduler
    sparse_gradients steps_per_print tensorboard timers torch_autocast train_batch_size
    train_micro_batch_size_per_gpu wall_clock_breakdown wandb zero_allow_untested_optimizer
    zero_force_ds_cpu_optimizer zero_optimization
    """.split()
)


def read_ds_file(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_without_repeats)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; a DeepSpeed config in JSON is expected") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise UserError(f"{path}: holds a {type(data).__name__}; a DeepSpeed config is a JSON object")
    for key in data:
        if key not in _KNOWN_KEYS:
            near = difflib.get_close_matches(key, _KNOWN_KEYS, n=1)
            hint = f"did you mean '{near[0]}'?" if near else "the run file decides everything else"
            raise UserError(f"{path}: {key}: not a DeepSpeed key that can be used here; {hint}")
    return data


def zero_stage(user: dict[str, Any]) -> int:
    return int(user.get("zero_optimization", {}).get("stage", 0))


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    for key in keys:
        if keys.count(key) > 1:
            raise ValueError(f"the key '{key}' stands twice")
    return dict(pairs)
