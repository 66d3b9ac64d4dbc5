"""A form of model: a folder with `model.safetensors`, `config.json`, the tokenizer's file and, so that training can
resume, `optimizer.safetensors`. Nothing in it is unpickled."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_style.base.errors import UserError
from megatron_style.base.files import atomic_folder, remove_leftovers
from megatron_style.base.json_text import parse_json
from megatron_style.base.run_folder import RunFolder
from megatron_style.config.model import ModelFolderConfig
from megatron_style.config.run import RunConfig
from megatron_style.data.corpus import Corpus, tokenizer_beside
from megatron_style.data.tokenizer import TOKENIZER_FILES
from megatron_style.formats import certificate
from megatron_style.formats.source import Holds, ModelSource, parameters_of, tensors_of
from megatron_style.schedule.stages import StageSchedule

CONFIG_FILE = "config.json"
WEIGHTS = "model.safetensors"
OPTIMIZER = "optimizer.safetensors"
_DTYPES = {torch.float32: "F32", torch.float64: "F64"}
_READABLE = ("F16", "BF16", "F32", "F64")
NAME = f"a model folder (with {CONFIG_FILE})"
FILES = frozenset({WEIGHTS, OPTIMIZER, CONFIG_FILE, *TOKENIZER_FILES, certificate.FILE})
HOLDS: Holds = None


def recognises(path: Path) -> bool:
    return (path / CONFIG_FILE).is_file()


def read(folder: Path) -> ModelSource:
    config = read_config(folder)
    state = _read_state(folder, config) if config.training else None
    tokenizer = partial(tokenizer_beside, folder / CONFIG_FILE)
    return ModelSource(folder, config, open_weights(folder, config), tokenizer, state)


def open_weights(folder: Path, config: ModelFolderConfig) -> Callable[[str], Tensor]:
    """Return the weights by name, each read when it is asked for; names and shapes are checked at once."""
    tensors = tensors_of(config)
    weights = open_tensors(folder / WEIGHTS)
    if weights.keys() != tensors.keys():
        odd = sorted(weights.keys() ^ tensors.keys())[0]
        raise UserError(f"{folder / WEIGHTS}: its tensors are not those of its {CONFIG_FILE}; '{odd}' is in one only")
    for name, layout in tensors.items():
        if weights[name].shape != layout.shape:
            held = list(weights[name].shape)
            raise UserError(f"{folder / WEIGHTS}: {name} is {held}, {CONFIG_FILE} wants {list(layout.shape)}")
    return lambda name: weights[name].get()


def write(folder: Path, source: ModelSource) -> None:
    """Write the model, with one tensor in memory at a time."""
    folder.mkdir(exist_ok=True)
    write_weights(folder / WEIGHTS, source)
    if source.state is not None:
        _write_state(folder / OPTIMIZER, source.config, source.state)
    (folder / CONFIG_FILE).write_text(json.dumps(source.config.as_data(), indent=2) + "\n", encoding="utf-8")
    if (tokenizer := source.tokenizer()) is not None:
        tokenizer.save(folder)


def write_atomically(folder: Path, source: ModelSource) -> None:
    """Write the folder so that it appears complete or not at all."""
    check_place(folder)
    with atomic_folder(folder) as aside:
        write(aside, source)


def export(weights: Mapping[str, Tensor], run: RunConfig, corpus: Corpus, schedule: StageSchedule) -> None:
    """Write the model of a finished run into the run's folder."""
    last = schedule.stages[-1]
    config = ModelFolderConfig(
        model=run.model,
        vocab_size=corpus.vocab_size,
        eos=corpus.eos,
        segment_length=last.segment_length,
        cache_length=last.cache_length,
        step=schedule.total_steps,
    )
    folder = RunFolder(run.output.path).model
    remove_leftovers(folder)  # safe, since this run holds the folder's lock
    write_atomically(folder, ModelSource(folder, config, weights.__getitem__, lambda: corpus.tokenizer))


def check_place(output: Path, known: frozenset[str] = FILES) -> None:
    """Refuse a place that holds more than an old model: other files must not be removed with it."""
    if not output.exists():
        return
    names = {path.name for path in output.iterdir()} if output.is_dir() else {""}
    if names and not (CONFIG_FILE in names and names <= known):
        raise UserError(f"{output}: exists and is not a model folder; choose another place for the model")


def write_weights(path: Path, source: ModelSource, rename: Callable[[str], str] = str) -> None:
    """Write all weights in float32, or in float64 if they come so."""
    tensors = tensors_of(source.config)
    dtype = torch.float64 if source.weight(next(iter(tensors))).dtype == torch.float64 else torch.float32
    wanted = [Entry(rename(name), layout.shape, _DTYPES[dtype]) for name, layout in tensors.items()]
    write_tensors(path, wanted, (source.weight(name).to(dtype) for name in tensors))


def _write_state(path: Path, config: ModelFolderConfig, state: Callable[[str], dict[str, Tensor]]) -> None:
    wanted = []
    for name in parameters_of(config):
        for key, tensor in state(name).items():
            wanted.append(Entry(f"{name}/{key}", tuple(tensor.shape), _DTYPES[tensor.dtype]))
    write_tensors(path, wanted, chain.from_iterable(state(name).values() for name in parameters_of(config)))


def _read_state(folder: Path, config: ModelFolderConfig) -> Callable[[str], dict[str, Tensor]]:
    """Return the optimizer state by parameter name, each read when it is asked for; shapes are checked at once."""
    parameters = parameters_of(config)
    held: dict[str, dict[str, Stored]] = {name: {} for name in parameters}
    for full, tensor in open_tensors(folder / OPTIMIZER).items():
        name, _, key = full.rpartition("/")
        if name not in held or tensor.shape not in (parameters[name].shape, ()):
            raise UserError(f"{folder / OPTIMIZER}: '{full}' is not the state of a parameter of its {CONFIG_FILE}")
        held[name][key] = tensor
    return lambda wanted: {key: tensor.get() for key, tensor in held[wanted].items()}


@dataclass(frozen=True)
class Entry:
    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def size(self) -> int:
        return (8 if self.dtype == "F64" else 4) * math.prod(self.shape)


def write_tensors(path: Path, entries: list[Entry], tensors: Iterator[Tensor]) -> None:
    """Write a safetensors file with one tensor in memory at a time; the library needs all of them at once."""
    header = {}
    offset = 0
    for entry in entries:
        offsets = [offset, offset + entry.size]
        header[entry.name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": offsets}
        offset += entry.size
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for entry, tensor in zip(entries, tensors, strict=True):
            assert tuple(tensor.shape) == entry.shape, (entry, tensor.shape)
            content = tensor.detach().contiguous().numpy()
            file.write(content.astype(content.dtype.newbyteorder("<"), copy=False).data)


@dataclass(frozen=True)
class Stored:
    """A tensor in a file, read when asked for."""

    shape: tuple[int, ...]
    get: Callable[[], Tensor]


def open_tensors(path: Path) -> dict[str, Stored]:
    try:
        file = safe_open(path, framework="pt")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except SafetensorError as error:
        raise UserError(f"{path}: not a complete safetensors file: {error}") from None
    stored = {}
    for name in file.keys():  # noqa: SIM118 - it is not a mapping
        held = file.get_slice(name)
        if held.get_dtype() not in _READABLE:
            raise UserError(f"{path}: '{name}' is of type {held.get_dtype()}; use one of {', '.join(_READABLE)}")
        stored[name] = Stored(tuple(held.get_shape()), partial(file.get_tensor, name))
    return stored


def read_config(folder: Path) -> ModelFolderConfig:
    return ModelFolderConfig.parse(read_settings(folder), source=str(folder / CONFIG_FILE))


def model_type(folder: Path) -> str | None:
    """Return the kind of model that a folder of the transformers library says it holds."""
    try:
        settings = parse_json((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return settings.get("model_type") if isinstance(settings, dict) else None


def read_settings(folder: Path) -> Any:
    path = folder / CONFIG_FILE
    try:
        return parse_json(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{folder}: no {CONFIG_FILE} in it; a folder of `convert` or of a run is expected") from None
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON: {error}") from None
