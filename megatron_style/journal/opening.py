"""What a launch records of itself, and what TensorBoard shows of a run apart from its record."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime

import torch

from megatron_style.base.launches import Launch, commit
from megatron_style.base.run_folder import RunFolder
from megatron_style.config.model import ModelConfig
from megatron_style.config.run import RunConfig
from megatron_style.engine.ds_config import read_ds_config
from megatron_style.engine.engine import TrainingEngine
from megatron_style.journal.hparams import Setting, chart_layout, flat
from megatron_style.journal.tensorboard import Opening, code_block
from megatron_style.parallel.topology import Topology
from megatron_style.planning.setup import Precision, Setup, Sharding
from megatron_style.schedule.stages import StageSchedule

_PRECISIONS: Mapping[torch.dtype, Precision] = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
}


def launch_of(
    run: RunConfig, schedule: StageSchedule, engine: TrainingEngine, topology: Topology, first_step: int
) -> Launch:
    return Launch(
        step=first_step,
        began=datetime.now(UTC).isoformat(timespec="seconds"),
        parameters=parameters_of(run.model, engine.model.vocab_size),
        corpus_tokens=schedule.corpus_tokens,
        total_steps=schedule.total_steps,
        data=topology.data.size,
        tensor=topology.tensor.size,
        zero=engine.zero_stage,
        precision=_PRECISIONS[engine.dtype],
        device=_name_of(engine.device),
        commit=commit(),
    )


def parameters_of(model: ModelConfig, vocab_size: int) -> int:
    """Return the number of parameters of the complete model, whatever a rank holds of it."""
    return Setup(model, vocab_size, (), Sharding()).parameters


def _name_of(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def opening_of(run: RunConfig, schedule: StageSchedule, launch: Launch) -> Opening:
    assert launch.data is not None, "a launch of this version has every figure"
    assert launch.tensor is not None, "a launch of this version has every figure"
    ranks = launch.data * launch.tensor
    folder = RunFolder(run.output.path)
    return Opening(
        name=folder.path.resolve().name,
        settings=_compared(run, schedule, launch, ranks),
        layout=chart_layout(schedule.sources.names if run.data.is_blend else (), ranks=ranks),
        texts={
            "run/config": code_block(folder.run_file.read_text(encoding="utf-8"), "yaml"),
            "run/ds_config": code_block(json.dumps(read_ds_config(run.deepspeed), indent=2), "json"),
        },
    )


def _compared(run: RunConfig, schedule: StageSchedule, launch: Launch, ranks: int) -> dict[str, Setting]:
    """Return the columns of the HPARAMS tab, which orders them by name and shows the first five at once: what runs
    usually differ in comes before all `settings`."""
    rate = run.optimizer.learning_rate
    first = {
        "layers": run.model.layers,
        "learning_rate": None if rate is None else rate.peak,
        "lengths": _in_words(stage.segment_length for stage in schedule.stages),
        "parameters": launch.parameters,
        "ranks": ranks,
    }
    facts = {
        "cache_lengths": _in_words(stage.cache_length for stage in schedule.stages),
        "precision": launch.precision,
        "zero": launch.zero,
    }
    return flat(first | {"settings": run.as_data() | facts})


def _in_words(lengths: Iterable[int]) -> str:
    return ", ".join(map(str, lengths))
