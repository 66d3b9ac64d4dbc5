"""The user's ds_config as a file: JSON whose keys are honoured or refused, as `ds_keys` says. Their values are checked
by DeepSpeed's own models, when the engine is built."""

from __future__ import annotations

import difflib
import json
from pathlib import Path
from typing import Any

from megatron_style.base.errors import UserError
from megatron_style.base.json_text import parse_json
from megatron_style.config.ds_keys import BLOCKS, NO_OPTIMIZERS, OPTIMIZERS, RULES, SCALES_RATE, SETS_RATE
from megatron_style.config.shipped import find_file


def read_ds_file(path: Path | None) -> dict[str, Any]:
    """Return the keys that are honoured; refused keys that ask for nothing (`"enabled": false`) are left out."""
    if path is None:
        return {}
    file = find_file(path, "a DeepSpeed config in JSON")
    try:
        data = parse_json(file.read_text(encoding="utf-8"), object_pairs_hook=_without_repeats)
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise UserError(f"{path}: holds a {type(data).__name__}; a DeepSpeed config is a JSON object")
    stage = _stage(data, str(path))
    asked = _asked(data, "", stage, str(path))
    _check_optimizer(asked, str(path))
    _check_scheduler(asked, str(path))
    return asked


def zero_stage(user: dict[str, Any]) -> int:
    return int(user.get("zero_optimization", {}).get("stage", 0))


def _stage(data: dict[str, Any], source: str) -> int:
    zero = data.get("zero_optimization", {})
    stage = zero.get("stage", 0) if isinstance(zero, dict) else 0
    if stage not in (0, 1, 2, 3) or isinstance(stage, bool | float):
        raise UserError(f"{source}: zero_optimization.stage is {json.dumps(stage)}; it must be 0, 1, 2 or 3")
    return int(stage)


def _asked(block: dict[str, Any], prefix: str, stage: int, source: str) -> dict[str, Any]:
    asked = {}
    for key, value in block.items():
        path = prefix + key
        if path in BLOCKS:
            if not isinstance(value, dict):
                raise UserError(f"{source}: {path} is {json.dumps(value)}; it must be an object, such as {{...}}")
            asked[key] = _asked(value, f"{path}.", stage, source)
        elif path not in RULES:
            raise UserError(f"{source}: {path}: {_unknown(key, prefix)}")
        elif _keep(path, value, stage, source):
            asked[key] = value
    return asked


def _keep(path: str, value: object, stage: int, source: str) -> bool:
    """True if the key is honoured; a refused one that asks for something is an error."""
    rule = RULES[path]
    if rule.verdict == "refused":
        if not rule.asks_for_nothing(value):
            raise UserError(f"{source}: {path}: {rule.why}")
        return False
    if value == "auto" and rule.verdict == "honoured":
        raise UserError(f'{source}: {path} is "auto", which another trainer would fill in; give a value or remove it')
    if stage not in rule.stages and value not in (False, None, "none"):
        fitting = " or ".join(map(str, rule.stages))
        raise UserError(
            f"{source}: {path} has no effect at zero_optimization.stage {stage}, only at {fitting}; remove it"
        )
    if path.endswith(".device") and value == "nvme":
        raise UserError(f"{source}: {path}: {RULES[path.replace('device', 'nvme_path')].why}")
    return True


def _unknown(key: str, prefix: str) -> str:
    known = sorted({path.removeprefix(prefix).split(".")[0] for path in RULES if path.startswith(prefix)})
    near = difflib.get_close_matches(key, known, n=1)
    return f"not a key of DeepSpeed's; did you mean '{near[0]}'?" if near else "not a key of DeepSpeed's; remove it"


def _check_optimizer(user: dict[str, Any], source: str) -> None:
    if "optimizer" not in user:
        return
    kind = user["optimizer"].get("type")
    if str(kind).lower() in NO_OPTIMIZERS:
        raise UserError(f"{source}: optimizer.type {kind}: {NO_OPTIMIZERS[str(kind).lower()]}; use AdamW")
    by_deepspeed = {name.lower() for name in OPTIMIZERS[:3]}  # DeepSpeed ignores case; the others are torch's
    if kind not in OPTIMIZERS and str(kind).lower() not in by_deepspeed:
        raise UserError(f"{source}: optimizer.type is {json.dumps(kind)}; use one of {', '.join(OPTIMIZERS)}")
    _check_params(user["optimizer"], "optimizer", source)


def _check_scheduler(user: dict[str, Any], source: str) -> None:
    if "scheduler" not in user:
        return
    kind = user["scheduler"].get("type")
    if kind not in SETS_RATE + SCALES_RATE:
        known = ", ".join(SETS_RATE + SCALES_RATE)
        raise UserError(f"{source}: scheduler.type is {json.dumps(kind)}; use one of {known}")
    _check_params(user["scheduler"], "scheduler", source)
    rate = user.get("optimizer", {}).get("params", {}).get("lr")
    if kind in SCALES_RATE and not rate:
        raise UserError(
            f"{source}: scheduler.type {kind} multiplies the learning rate of the ds_config's own optimizer, and there "
            f"is none; use {SETS_RATE[0]}, or set optimizer.params.lr in addition"
        )


def _check_params(block: dict[str, Any], name: str, source: str) -> None:
    if not isinstance(block.setdefault("params", {}), dict):
        raise UserError(f"{source}: {name}.params is {json.dumps(block['params'])}; it must be an object")


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    seen = set()
    for key, _ in pairs:
        if key in seen:
            raise ValueError(f"duplicate key '{key}'")
        seen.add(key)
    return dict(pairs)
