"""A model from wherever it is: a model folder, or a training checkpoint of any grid."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megatron_style.checkpoint.logical import LogicalReader
from megatron_style.checkpoint.manifest import FILE, Damaged, Manifest, check_file, read_manifest
from megatron_style.checkpoint.model_folder import CONFIG_FILE, open_weights, parameter_shapes, read_model_config
from megatron_style.config.errors import UserError
from megatron_style.config.model import ModelFolderConfig
from megatron_style.config.run import RunConfig
from megatron_style.data.corpus import tokenizer_beside
from megatron_style.data.tokenizer import Tokenizer, load_tokenizer
from megatron_style.model.shortformer import Shortformer
from megatron_style.parallel.sharding import layout_of, shard_of
from megatron_style.parallel.topology import Axis
from megatron_style.schedule.stages import resolve_stage


@dataclass(frozen=True)
class ModelSource:
    path: Path
    config: ModelFolderConfig
    weight: Callable[[str], Tensor]  # by name, whole
    tokenizer: Callable[[], Tokenizer | None]

    @torch.no_grad()
    def load(self, dtype: torch.dtype = torch.float32, axis: Axis | None = None) -> Shortformer:
        """The model, or this rank's shard of it."""
        axis = axis or Axis()
        model = Shortformer(self.config.model, self.config.vocab_size, axis).to(dtype)
        for name, param in model.named_parameters():
            param.copy_(shard_of(self.weight(name), layout_of(param), axis))
        return model


def open_model(path: Path) -> ModelSource:
    """`path` is a model folder, a run's folder, its `checkpoints` folder, or one `global_stepN`."""
    if (path / CONFIG_FILE).is_file():
        config = read_model_config(path)
        return ModelSource(path, config, open_weights(path, parameter_shapes(config)), lambda: load_tokenizer(path))
    folder, manifest = open_checkpoint(path)
    run = RunConfig.parse(manifest.run, source=str(folder))
    weight = LogicalReader(folder, manifest).weight
    return ModelSource(folder, _config(run, manifest), weight, lambda: tokenizer_beside(run.data.train))


def open_checkpoint(path: Path) -> tuple[Path, Manifest]:
    """Checked byte by byte: a damaged checkpoint is never read in part."""
    folder = _find_checkpoint(path)
    try:
        manifest = read_manifest(folder)
        for name, (size, digest) in manifest.files.items():
            check_file(folder, name, size, digest)
    except Damaged as damage:
        raise UserError(f"{folder}: is not whole: {damage}") from None
    return folder, manifest


def _find_checkpoint(path: Path) -> Path:
    if (path / FILE).is_file():
        return path
    for folder in (path, path / "checkpoints"):
        latest = folder / "latest"
        if latest.is_file():
            return folder / latest.read_text(encoding="utf-8").strip()
    raise UserError(f"{path}: neither a model folder (with {CONFIG_FILE}) nor a run or checkpoint (with {FILE})")


def _config(run: RunConfig, manifest: Manifest) -> ModelFolderConfig:
    last = resolve_stage(run, len(run.stages) - 1)
    return ModelFolderConfig(
        model=run.model,
        vocab_size=manifest.vocab_size,
        segment_length=last.segment_length,
        cache_length=last.cache_length,
        step=manifest.step,
    )
