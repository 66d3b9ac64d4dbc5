"""A model as a folder: `model.safetensors`, `config.json` and the tokenizer's file. Nothing in it is unpickled."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megatron_style.config.errors import UserError
from megatron_style.config.model import ModelFolderConfig
from megatron_style.data.folder import whole_folder
from megatron_style.data.tokenizer import BPE_FILE, DICTIONARY_FILE, Tokenizer
from megatron_style.model.shortformer import Shortformer

_WEIGHTS, _CONFIG = "model.safetensors", "config.json"


def write_model(
    folder: Path, config: ModelFolderConfig, weights: Mapping[str, Tensor], tokenizer: Tokenizer | None
) -> None:
    """The folder appears whole or not at all."""
    if folder.exists() and not _may_be_replaced(folder):
        raise UserError(f"{folder}: exists and is not a model folder; choose another place for the model")
    with whole_folder(folder) as aside:
        save_file({name: tensor.contiguous() for name, tensor in weights.items()}, aside / _WEIGHTS)
        (aside / _CONFIG).write_text(json.dumps(config.as_data(), indent=2) + "\n", encoding="utf-8")
        if tokenizer is not None:
            tokenizer.save(aside)


def _may_be_replaced(folder: Path) -> bool:
    """Is it empty, or a model's and nothing else's? Files of somebody else must not go with an old model."""
    if not folder.is_dir():
        return False
    names = {path.name for path in folder.iterdir()}
    return not names or (_CONFIG in names and names <= {_WEIGHTS, _CONFIG, DICTIONARY_FILE, BPE_FILE})


def read_model_config(folder: Path) -> ModelFolderConfig:
    path = folder / _CONFIG
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{folder}: no {_CONFIG} in it; a folder made by `convert` or by a run is expected") from None
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON: {error}") from None
    config = ModelFolderConfig.parse(data, source=str(path))
    _check_vocabulary(config, path)
    return config


def _check_vocabulary(config: ModelFolderConfig, path: Path) -> None:
    cutoffs = config.model.vocabulary.cutoffs
    if max(config.eos, *cutoffs, 0) >= config.vocab_size:
        raise UserError(
            f"{path}: vocab_size is {config.vocab_size}; it must be above eos ({config.eos}) and the "
            f"cutoffs ({list(cutoffs)})"
        )


def read_model(folder: Path, dtype: torch.dtype = torch.float32) -> tuple[Shortformer, ModelFolderConfig]:
    config = read_model_config(folder)
    model = Shortformer(config.model, config.vocab_size).to(dtype)
    copy_weights(model, folder / _WEIGHTS)
    return model, config


@torch.no_grad()
def copy_weights(model: Shortformer, path: Path) -> None:
    """Fill the model from a safetensors file, one tensor at a time; names and shapes must match exactly."""
    params = dict(model.named_parameters())
    try:
        with safe_open(path, framework="pt") as file:
            if set(file.keys()) != set(params):
                odd = sorted(set(file.keys()) ^ set(params))[0]
                raise UserError(f"{path}: its tensors are not those of its config.json; '{odd}' is in one only")
            for name, param in params.items():
                tensor = file.get_tensor(name)
                if tensor.shape != param.shape:
                    raise UserError(f"{path}: {name} is {list(tensor.shape)}, config.json wants {list(param.shape)}")
                param.copy_(tensor)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except SafetensorError as error:
        raise UserError(f"{path}: not a whole safetensors file: {error}") from None
