"""A form of model: a training checkpoint of any grid. Read only; `train` writes it."""

from __future__ import annotations

from pathlib import Path

from megatron_style.base.errors import UserError
from megatron_style.checkpoint.logical import LogicalReader
from megatron_style.checkpoint.manifest import FILE, Manifest, find_checkpoint, open_checkpoint
from megatron_style.config.model import ModelFolderConfig
from megatron_style.config.run import RunConfig
from megatron_style.data.corpus import first_token, tokenizer_of_run
from megatron_style.formats.source import Holds, ModelSource, parameters_of
from megatron_style.schedule.stages import resolve_stage

NAME = f"a run or one of its checkpoints (with {FILE})"
FILES = frozenset[str]()
HOLDS: Holds = None
# The optimizers whose state other forms can hold. DeepSpeed's Adam is AdamW.
_MOVABLE = {"nag": "nag", "adamw": "adamw", "adam": "adamw"}


def recognises(path: Path) -> bool:
    """True for a run's folder, its `checkpoints` folder, or one `global_stepN`."""
    return find_checkpoint(path) is not None


def read(path: Path) -> ModelSource:
    folder, manifest = open_checkpoint(path)
    run = RunConfig.parse(manifest.run, source=str(folder))
    reader = LogicalReader(folder, manifest)
    tokenizer = tokenizer_of_run(folder.parent.parent, run.data)
    config = _config(run, manifest, first_token(run.model, tokenizer), reader.learning_rate())
    shapes = {name: layout.shape for name, layout in parameters_of(config).items()}
    if {name: layout.shape for name, layout in manifest.parameters.items()} != shapes:
        raise UserError(f"{folder}: its {FILE} names other parameters than its model has, so it is not read")

    return ModelSource(
        folder,
        config,
        reader.weight,
        lambda: tokenizer,
        reader.state if manifest.optimizer in _MOVABLE else None,
    )


def _config(run: RunConfig, manifest: Manifest, eos: int, learning_rate: float) -> ModelFolderConfig:
    last = resolve_stage(run, len(run.stages) - 1)
    data = {
        "model": run.model.as_data(),
        "vocab_size": manifest.vocab_size,
        "eos": eos,
        "segment_length": last.segment_length,
        "cache_length": last.cache_length,
        "step": manifest.step,
    }
    if manifest.optimizer in _MOVABLE:
        data["training"] = {
            "optimizer": _MOVABLE[manifest.optimizer],
            "learning_rate": learning_rate,
            "momentum": run.optimizer.momentum,
            "weight_decay": run.optimizer.weight_decay,
            "epoch": 1 + manifest.tokens // manifest.corpus_tokens,
        }
    return ModelFolderConfig.parse(data, source=str(manifest.run["output"]["path"]))
