"""Every key of DeepSpeed's own models is in the table, and the page shows the table."""

from __future__ import annotations

from pathlib import Path

import pytest
from deepspeed.comm.config import CommsLoggerConfig
from deepspeed.monitor.config import CometConfig, CSVConfig, TensorBoardConfig, WandbConfig
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadOptimizerConfig, DeepSpeedZeroOffloadParamConfig
from pydantic import BaseModel

from megatron_style.config.ds_keys import NO_OPTIMIZERS, OPTIMIZERS, RULES, SCALES_RATE, SETS_RATE

PAGE = Path(__file__).parents[2] / "docs" / "ds_config.md"
MODELS: dict[str, type[BaseModel]] = {
    "zero_optimization": DeepSpeedZeroConfig,
    "zero_optimization.offload_optimizer": DeepSpeedZeroOffloadOptimizerConfig,
    "zero_optimization.offload_param": DeepSpeedZeroOffloadParamConfig,
    "bf16": DeepSpeedBF16Config,
    "fp16": DeepSpeedFP16Config,
    "comms_logger": CommsLoggerConfig,
    "tensorboard": TensorBoardConfig,
    "csv_monitor": CSVConfig,
    "wandb": WandbConfig,
    "comet": CometConfig,
}


@pytest.mark.parametrize("block", MODELS)
def test_the_table_knows_every_key_of_deepspeeds_models(block: str) -> None:
    theirs = {field.alias or name for name, field in MODELS[block].model_fields.items()}
    ours = {path.removeprefix(f"{block}.").split(".")[0] for path in RULES if path.startswith(f"{block}.")}
    assert ours == theirs


def table() -> str:
    lines = ["| key | here | |", "|---|---|---|"]
    for path, rule in RULES.items():
        stages = "" if rule.stages == (0, 1, 2, 3) else f" (ZeRO {', '.join(map(str, rule.stages))})"
        lines.append(f"| `{path}` | {rule.verdict}{stages} | {rule.why} |")
    return "\n".join(lines)


def test_the_page_shows_the_table() -> None:
    """If it fails: print `table()` into the page."""
    page = PAGE.read_text(encoding="utf-8")
    assert table() in page
    counted = [sum(rule.verdict == verdict for rule in RULES.values()) for verdict in ("honoured", "agreed", "refused")]
    assert "{} keys are honoured, {} have to agree with the run file, {} are refused".format(*counted) in page
    for name in (*OPTIMIZERS, *SETS_RATE, *SCALES_RATE):
        assert f"`{name}`" in page
    assert all(why in page for why in NO_OPTIMIZERS.values())
