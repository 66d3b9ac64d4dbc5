"""A model as a folder: `model.safetensors`, `config.json` and the tokenizer's file. Nothing in it is unpickled."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_style.config.errors import UserError
from megatron_style.config.model import ModelFolderConfig
from megatron_style.data.folder import whole_folder
from megatron_style.data.tokenizer import BPE_FILE, DICTIONARY_FILE, Tokenizer
from megatron_style.model.shortformer import Shortformer

CONFIG_FILE = "config.json"
_WEIGHTS = "model.safetensors"


def write_model(
    folder: Path, config: ModelFolderConfig, weight: Callable[[str], Tensor], tokenizer: Tokenizer | None
) -> None:
    """The folder appears whole or not at all. Weights are asked for by name, one after the other."""
    if folder.exists() and not _may_be_replaced(folder):
        raise UserError(f"{folder}: exists and is not a model folder; choose another place for the model")
    with whole_folder(folder) as aside:
        _write_weights(aside / _WEIGHTS, parameter_shapes(config), weight)
        (aside / CONFIG_FILE).write_text(json.dumps(config.as_data(), indent=2) + "\n", encoding="utf-8")
        if tokenizer is not None:
            tokenizer.save(aside)


def parameter_shapes(config: ModelFolderConfig) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        model = Shortformer(config.model, config.vocab_size)
    return {name: tuple(param.shape) for name, param in model.named_parameters()}


def _write_weights(path: Path, shapes: Mapping[str, tuple[int, ...]], weight: Callable[[str], Tensor]) -> None:
    """safetensors, float32. The library wants all tensors in memory at once; this holds one at a time."""
    header, offset = {}, 0
    for name, shape in shapes.items():
        size = 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, shape in shapes.items():
            tensor = weight(name).detach().float().contiguous()
            assert tuple(tensor.shape) == shape, (name, tensor.shape, shape)
            file.write(tensor.numpy().astype("<f4", copy=False).data)


def _may_be_replaced(folder: Path) -> bool:
    """Is it empty, or a model's and nothing else's? Files of somebody else must not go with an old model."""
    if not folder.is_dir():
        return False
    names = {path.name for path in folder.iterdir()}
    return not names or (CONFIG_FILE in names and names <= {_WEIGHTS, CONFIG_FILE, DICTIONARY_FILE, BPE_FILE})


def read_model_config(folder: Path) -> ModelFolderConfig:
    path = folder / CONFIG_FILE
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{folder}: no {CONFIG_FILE} in it; a folder of `convert` or of a run is expected") from None
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


def open_weights(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> Callable[[str], Tensor]:
    """The tensors of `model.safetensors` by name, read as they are asked for; names and shapes must match exactly."""
    path = folder / _WEIGHTS
    try:
        file = safe_open(path, framework="pt")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except SafetensorError as error:
        raise UserError(f"{path}: not a whole safetensors file: {error}") from None
    names: list[str] = file.keys()
    held = {name: tuple(file.get_slice(name).get_shape()) for name in names}
    if set(held) != set(shapes):
        odd = sorted(set(held) ^ set(shapes))[0]
        raise UserError(f"{path}: its tensors are not those of its {CONFIG_FILE}; '{odd}' is in one only")
    for name, shape in shapes.items():
        if held[name] != shape:
            raise UserError(f"{path}: {name} is {list(held[name])}, {CONFIG_FILE} wants {list(shape)}")
    get: Callable[[str], Tensor] = file.get_tensor
    return get
