"""A form of model: DeepSpeed's universal checkpoint. An engine with `"checkpoint": {"load_universal": true}` loads it
by `engine.load_checkpoint(folder)`, whatever its number of ranks.

    latest_universal             the name of the folder with DeepSpeed's files
    global_stepN/zero/NAME/      a parameter, unsharded: fp32.pt, and one file for each tensor of its optimizer state
    global_stepN/zero/optimizer_state.pt, global_stepN/*_model_states.pt     what the loaders of all stages ask for
    universal.json               for us: the model's config, and the size and digest of every file
    dict.txt or tokenizer.json

AdamW's state has DeepSpeed's own names. NAG's momentum stays `momentum_buffer`: ZeRO 1 and 2 load each file as the
state it is named after, so our optimizer finds it there. ZeRO 3 asks for Adam's two by name and fails. Under the name
`exp_avg` it would load, but our optimizer would not look there, and Adam would take it for a running mean, which it is
not. `load_module_only=True` loads the weights only.

Nothing is unpickled that could run code. The optimizer's settings are not stored: the engine has its own."""

from __future__ import annotations

from functools import partial
from importlib.metadata import version
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor

from megatron_style.base.errors import UserError
from megatron_style.base.run_folder import checkpoint_name
from megatron_style.checkpoint.logical import is_plain
from megatron_style.checkpoint.manifest import Damaged, check_file, digest_of, is_file_name, read_sealed, write_sealed
from megatron_style.config.model import ModelConfig, ModelFolderConfig
from megatron_style.data.corpus import tokenizer_beside
from megatron_style.formats.source import ANY, Holds, ModelSource, parameters_of
from megatron_style.parallel.split import Shape

LATEST = "latest_universal"
INDEX = "universal.json"
NAME = f"a universal checkpoint of DeepSpeed (with {LATEST})"
FILES = frozenset[str]()
# An engine loads parameters only, so that centroids would stay as they were drawn.
HOLDS: Holds = dict.fromkeys(ModelConfig.model_fields, ANY) | {"routing": (None,)}
VERSION = 0.4  # of the layout, as DeepSpeed counts
_WEIGHT = "fp32"
_GROUPS = 100  # all empty; the loader zips them with the engine's own, so that surplus ones are ignored


def recognises(path: Path) -> bool:
    return (path / LATEST).is_file()


def read(folder: Path) -> ModelSource:
    """Open the checkpoint after a check of every byte: a damaged one is never read in part."""
    try:
        index = _read_index(folder)
        for file, (size, digest) in index["files"].items():
            check_file(folder, file, size, digest)
    except Damaged as damage:
        raise UserError(f"{folder}: is not a complete checkpoint of `convert export-universal`: {damage}") from None
    config = ModelFolderConfig.parse(index["config"], source=str(folder / INDEX))
    parameters = parameters_of(config)
    held = _tensors(index["files"])
    if any(_WEIGHT not in held.get(name, ()) for name in parameters):
        raise UserError(f"{folder}: does not hold all weights of the model in its {INDEX}")

    def tensor(name: str, key: str) -> Tensor:
        shape = parameters[name].shape
        return _load(folder / held[name][key], (shape,) if key == _WEIGHT else (shape, ()))

    return ModelSource(
        folder,
        config,
        lambda name: tensor(name, _WEIGHT),
        partial(tokenizer_beside, (folder / INDEX).absolute()),
        (lambda name: {key: tensor(name, key) for key in held[name] if key != _WEIGHT}) if config.training else None,
    )


def _read_index(folder: Path) -> dict[str, Any]:
    """Return the config, and the size and digest of every file by its path in the folder."""
    index = read_sealed(folder / INDEX)
    try:
        listed = index["files"].items()
        files = {_path_inside(file): (int(size), str(digest)) for file, (size, digest) in listed}
        return {"config": index["config"], "files": files}
    except (TypeError, ValueError, LookupError, AttributeError, OverflowError) as error:
        raise Damaged(f"its {INDEX} does not hold a config and a list of files ({error})") from None


def _path_inside(file: str) -> str:
    if not all(is_file_name(part) for part in file.split("/")):
        raise ValueError(f"{file!r} is not a file of this folder")
    return file


def write(folder: Path, source: ModelSource) -> None:
    """Write the checkpoint. `latest_universal` is in the folder, not next to it, so that everything appears at once."""
    inner = folder / checkpoint_name(source.config.step)
    step = None
    for name, layout in parameters_of(source.config).items():
        step = _write_parameter(inner / "zero" / name, source, name, _cut(name, layout))
    torch.save(_optimizer(step), inner / "zero" / "optimizer_state.pt")
    for file in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"):  # ZeRO 1 and 2; ZeRO 3
        torch.save(_counters(source.config.step), inner / file)
    (folder / LATEST).write_text(inner.name, encoding="utf-8")
    if (tokenizer := source.tokenizer()) is not None:
        tokenizer.save(folder)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    digests = {path.relative_to(folder).as_posix(): (path.stat().st_size, digest_of(path)) for path in files}
    write_sealed(folder / INDEX, {"config": source.config.as_data(), "files": digests})


def _write_parameter(place: Path, source: ModelSource, name: str, cut: dict[str, Any]) -> Tensor | None:
    """Write a parameter and return Adam's step, if there is one: it is the same for all parameters."""
    place.mkdir(parents=True)
    _save(place / f"{_WEIGHT}.pt", source.weight(name).float(), cut)
    state = source.state(name) if source.state else {}
    for key, tensor in state.items():
        _save(place / f"{key}.pt", tensor, cut)
    return state.get("step")


def _tensors(files: dict[str, Any]) -> dict[str, dict[str, str]]:
    """Return the files by parameter, and then by `fp32` or the name of a state."""
    held: dict[str, dict[str, str]] = {}
    for file in files:
        match PurePosixPath(file).parts:
            case (_, "zero", name, key):
                held.setdefault(name, {})[key.removesuffix(".pt")] = file
    return held


def _cut(name: str, layout: Shape) -> dict[str, Any]:
    """Return what a tensor-parallel engine needs to take its shard. Only shards of vocabularies may be padded."""
    if layout.shard_dim is None:
        return {}
    return {"cat_dim": layout.shard_dim, "vocab_tensor": name.startswith("vocabulary.")}


def _save(path: Path, tensor: Tensor, cut: dict[str, Any]) -> None:
    """Save a tensor; a single number, such as Adam's step, without `cut`."""
    if tensor.untyped_storage().nbytes() > tensor.nbytes:
        tensor = tensor.clone()  # of a view, torch would save the entire storage
    torch.save({**cut, "param": tensor} if tensor.dim() else tensor, path)


def _load(path: Path, shapes: tuple[tuple[int, ...], ...]) -> Tensor:
    try:
        held = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception:  # on foreign bytes the unpickler may raise anything
        raise UserError(f"{path}: more than a tensor or not one, so it was not loaded") from None
    tensor = held.get("param") if isinstance(held, dict) else held
    if not is_plain(tensor) or tensor.shape not in shapes:
        raise UserError(f"{path}: does not hold a tensor of {list(shapes[0])}, as its model wants")
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _optimizer(step: Tensor | None) -> dict[str, Any]:
    """Return the optimizer's state, where ZeRO 3 reads the step; ZeRO 1 and 2 read it with each parameter."""
    groups: list[dict[str, Any]] = [{} for _ in range(_GROUPS)]
    state = {} if step is None else {0: {"step": step}}
    return {
        "ds_version": version("deepspeed"),
        "param_groups": groups,
        "optimizer_state_dict": {"state": state, "param_groups": groups},
    }


def _counters(step: int) -> dict[str, Any]:
    return {
        "global_steps": step,
        "skipped_steps": 0,
        "lr_scheduler": {"last_batch_iteration": step - 1},  # of DeepSpeed's own schedules
        "dp_world_size": 1,
        "mp_world_size": 1,
        "ds_version": version("deepspeed"),
        "universal_checkpoint_info": {"universal_checkpoint_version": VERSION},
    }
