"""Runs that are stopped, killed or moved and then resumed, and functions that compare them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from megatron_style.base.errors import Stopped
from megatron_style.checkpoint.logical import LogicalReader
from megatron_style.checkpoint.manifest import read_manifest
from megatron_style.config.run import RunConfig
from megatron_style.parallel.local_ranks import run_ranks
from megatron_style.supervision.stop import Asked
from megatron_style.train import train
from tests.support.runs import tiny_run
from tests.support.training import VOCAB_SIZE, write_ds_config

DROPOUT = {"hidden": 0.2, "attention": 0.1, "activation": 0.1, "softmax": 0.1}
RANK_TIMES = ("slowest_rank", "slowest", "fastest_rank", "fastest")
UPDATE = 192  # tokens over all data-parallel ranks; the corpus of 1200 is six updates and a short one


class HaltAfter:
    """Replaces StopRequest and asks to stop after N steps."""

    def __init__(self, steps: int) -> None:
        self._left = steps

    def agreed(self) -> Asked:
        self._left -= 1
        return Asked("the test asked for it", True) if self._left == 0 else Asked(None, False)

    def saved(self) -> None: ...


def make_run(
    folder: Path,
    name: str = "run",
    *,
    tensor: int = 1,
    data: int = 1,
    zero: int = 1,
    steps: int = 40,
    update: int = UPDATE,
    recompute: bool = False,
    dropout: bool = False,
    half: bool = False,
    **more: Any,
) -> RunConfig:
    """Return a run of two stages of equal length that switches in mid-epoch."""
    base = tiny_run().model.as_data() | {"dropout": DROPOUT if dropout else {}}
    output = {"path": str(folder / name), "log_every": 1, "save_every": 5}
    output |= {"evaluate_every": 10, "evaluate_tokens": 100, "sample_tokens": 5}
    return tiny_run(
        stages=[{"segment_length": 8, "steps": steps // 2}, {"segment_length": 24, "steps": steps - steps // 2}],
        tokens_per_batch=update // data,
        model=base | more.pop("model", {}),
        data={
            "train": str(folder / "train"),
            "valid": str(folder / "valid"),
            "vocab_size": more.pop("vocab_size", VOCAB_SIZE),
        },
        optimizer={"name": "nag", "clip_norm": 0.5, "learning_rate": {"peak": 0.3, "warmup_steps": 3}}
        | more.pop("optimizer", {}),
        parallel={"tensor": tensor, "recompute": recompute, "micro_tokens": more.pop("micro_tokens", 48)}
        | more.pop("parallel", {}),
        output=output | more.pop("output", {}),
        deepspeed=str(
            write_ds_config(
                folder,
                zero_optimization={"stage": zero},
                bf16={"enabled": half},
                **({"data_types": {"grad_accum_dtype": "fp32"}} if half else {}),  # as in ds_configs/
                **more.pop("ds", {}),
            )
        ),
    )


def train_until(run: RunConfig, steps: int | None) -> None:
    if steps is None:
        train(run)
        return
    with patch("megatron_style.train.StopRequest", lambda *_, **__: HaltAfter(steps)), pytest.raises(Stopped):
        train(run)


def on_ranks(run: RunConfig, world: int, *, halt_after: int | None = None) -> None:
    age_event_files(run)
    run_ranks(world, train_until, run, halt_after)


def age_event_files(run: RunConfig) -> None:
    """Rename TensorBoard's files as if the launch before had begun a minute ago: a launch within the same second would
    wait for the next."""
    for path in run.output.path.glob("tensorboard/**/events.out.tfevents.*"):
        began = path.name.split(".")[3]
        path.rename(path.with_name(path.name.replace(began, f"{int(began) - 60:010d}", 1)))


def metrics(run: RunConfig, kind: str = "train") -> list[dict[str, Any]]:
    lines = map(json.loads, (run.output.path / "metrics.jsonl").read_text().splitlines())
    timed = ("seconds", "stage_seconds", "tokens_per_second", "flops_per_second", "memory_bytes", *RANK_TIMES)
    return [{k: v for k, v in line.items() if k not in timed} for line in lines if line["kind"] == kind]


def final_state(run: RunConfig) -> dict[str, dict[str, torch.Tensor]]:
    checkpoints = run.output.path / "checkpoints"
    newest = checkpoints / (checkpoints / "latest").read_text()
    manifest = read_manifest(newest)
    reader = LogicalReader(newest, manifest)
    return {name: reader.read(name) for name in manifest.parameters}


def exported_weights(run: RunConfig) -> dict[str, torch.Tensor]:
    return load_file(run.output.path / "model" / "model.safetensors")


def expect_bitwise(run: RunConfig, expected: RunConfig) -> None:
    for kind in ("train", "valid", "sample", "stage", "stage_end"):
        assert metrics(run, kind) == metrics(expected, kind)
    state = final_state(run)
    for name, tensors in final_state(expected).items():
        for key, value in tensors.items():
            assert torch.equal(state[name][key], value), (name, key)
    weights = exported_weights(run)
    for name, weight in exported_weights(expected).items():
        assert torch.equal(weights[name], weight), name


def expect_close(run: RunConfig, expected: RunConfig, *, half: bool = False) -> None:
    """Compare two runs on different grids. In bf16 they differ by its rounding: numbers have 8 bits."""
    loose = {"loss": 2**-8, "grad_norm": 2**-4} if half else {}
    for key in ("step", "tokens", "loss", "grad_norm", "learning_rate"):
        found = [event[key] for event in metrics(run)]
        wanted = [event[key] for event in metrics(expected)]
        np.testing.assert_allclose(found, wanted, rtol=loose.get(key, 1e-5), err_msg=key)
    weights = exported_weights(run)
    for name, weight in exported_weights(expected).items():
        np.testing.assert_allclose(weights[name], weight, atol=0.05 if half else 1e-5, err_msg=name)


def damage(path: Path, how: str) -> None:
    if how == "missing":
        path.unlink()
    elif how == "truncated":
        path.write_bytes(path.read_bytes()[:-10])
    else:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
