"""A form of model: a folder with `model.safetensors` or shards of it, `config.json`, the tokenizer's file and, so that
training can resume, `optimizer.safetensors`. Nothing in it is unpickled."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from itertools import chain
from operator import methodcaller
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from megatron_style.base.errors import UserError
from megatron_style.base.files import atomic_folder, remove_leftovers
from megatron_style.base.json_text import parse_json
from megatron_style.base.model_files import INDEX, SHARD_BYTES, WEIGHTS, is_shard
from megatron_style.base.run_folder import RunFolder
from megatron_style.config.model import ModelFolderConfig
from megatron_style.config.run import RunConfig
from megatron_style.data.corpus import Corpus, tokenizer_beside
from megatron_style.data.tokenizer import TOKENIZER_FILES
from megatron_style.formats import certificate
from megatron_style.formats.source import Holds, ModelSource, parameters_of, tensors_of
from megatron_style.formats.tensor_files import (
    Entry,
    Stored,
    open_sharded,
    open_tensors,
    weights_file,
    write_sharded,
    write_tensors,
)
from megatron_style.schedule.stages import StageSchedule

CONFIG_FILE = "config.json"
OPTIMIZER = "optimizer.safetensors"
_DTYPES = {torch.float32: "F32", torch.float64: "F64"}
NAME = f"a model folder (with {CONFIG_FILE})"
FILES = frozenset({WEIGHTS, INDEX, OPTIMIZER, CONFIG_FILE, *TOKENIZER_FILES, certificate.FILE})
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
    where = weights_file(folder)
    weights = open_sharded(folder)
    if weights.keys() != tensors.keys():
        odd = sorted(weights.keys() ^ tensors.keys())[0]
        raise UserError(f"{where}: its tensors are not those of its {CONFIG_FILE}; '{odd}' is in one only")
    for name, layout in tensors.items():
        if weights[name].shape != layout.shape:
            held = list(weights[name].shape)
            raise UserError(f"{where}: {name} is {held}, {CONFIG_FILE} wants {list(layout.shape)}")
    return lambda name: weights[name].get()


def write(folder: Path, source: ModelSource, *, shard_bytes: int = SHARD_BYTES) -> None:
    """Write the model, with one tensor in memory at a time."""
    folder.mkdir(exist_ok=True)
    write_weights(folder, source, shard_bytes=shard_bytes)
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


def export(
    weight: Callable[[str], Tensor | None], run: RunConfig, corpus: Corpus, schedule: StageSchedule, *, is_first: bool
) -> None:
    """Write the model of a finished run into the run's folder. All ranks call it: `weight` gathers a tensor from all of
    them, and returns it on the first, which writes it."""
    config = folder_config(run, corpus, schedule)
    if not is_first:
        for name in tensors_of(config):
            weight(name)
        return
    folder = RunFolder(run.output.path).model
    remove_leftovers(folder)  # safe, since this run holds the folder's lock
    gathered = cast(Callable[[str], Tensor], weight)
    write_atomically(folder, ModelSource(folder, config, gathered, lambda: corpus.tokenizer))


def folder_config(run: RunConfig, corpus: Corpus, schedule: StageSchedule) -> ModelFolderConfig:
    """Return the `config.json` of a finished run's model."""
    last = schedule.stages[-1]
    return ModelFolderConfig(
        model=run.model,
        vocab_size=corpus.vocab_size,
        eos=corpus.eos,
        segment_length=last.segment_length,
        cache_length=last.cache_length,
        step=schedule.total_steps,
    )


def check_place(output: Path, known: frozenset[str] = FILES) -> None:
    """Refuse a place that holds more than an old model: other files must not be removed with it."""
    if not output.exists():
        return
    names = {path.name for path in output.iterdir()} if output.is_dir() else {""}
    foreign = {name for name in names - known if not is_shard(name)}
    if names and (foreign or CONFIG_FILE not in names):
        raise UserError(f"{output}: exists and is not a model folder; choose another place for the model")


def write_weights(folder: Path, source: ModelSource, *, shard_bytes: int) -> None:
    """Write all weights in float32, or in float64 if they come so. Each is asked for once, in the model's order: those
    of a run are gathered from all ranks."""
    tensors = tensors_of(source.config)
    weights = map(source.weight, tensors)
    first = next(weights)
    dtype = torch.float64 if first.dtype == torch.float64 else torch.float32
    entries = [Entry(name, layout.shape, _DTYPES[dtype]) for name, layout in tensors.items()]
    given = chain(iter([first]), weights)
    del first  # it would stay in memory until the last is written
    converted = map(methodcaller("to", dtype), given)  # a generator would hold each until it has the next
    write_sharded(folder, entries, converted, shard_bytes=shard_bytes)


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
