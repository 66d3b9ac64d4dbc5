"""The paths in a run file, which are relative to the current folder or to the run file's, whichever has them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from megatron_style.base.errors import UserError
from megatron_style.config.run import RunConfig
from megatron_style.config.shipped import find_file

_STORE = (".bin", ".idx")  # of a store, whose path has no suffix


def located(run: RunConfig, folder: Path) -> RunConfig:
    """Return the run with paths that lead there from the current folder. `folder` is the run file's."""
    find = partial(_found, folder=folder)
    data = run.data
    if isinstance(data.train, Path):
        train: object = find(data.train)
    else:
        train = tuple(source.model_copy(update={"path": find(source.path)}) for source in data.train)
    if isinstance(data.valid, Path):
        valid: object = find(data.valid)
    else:
        valid = {name: find(path) for name, path in data.valid.items()}
    return run.model_copy(
        update={
            "data": data.model_copy(update={"train": train, "valid": valid}),
            "output": run.output.model_copy(update={"path": find(run.output.path)}),
            "deepspeed": run.deepspeed and find(run.deepspeed),
            "start": run.start and find(run.start),
        }
    )


def check_inputs(run: RunConfig, folder: Path) -> None:
    """Refuse a run whose files are missing, before anything is imported that takes seconds, and say what was tried."""
    for key, path in _inputs(run):
        if _exists(path):
            continue
        tried = dict.fromkeys([Path.cwd() / path, folder.absolute() / path])  # an absolute path once
        places = " and ".join(map(str, tried))
        remedy = "make it with `prepare`" if key.startswith("data") else "check the path"
        raise UserError(f"{key}: {path} does not exist; {remedy} (tried {places})")
    if run.deepspeed is not None:
        find_file(run.deepspeed, "a ds_config in JSON")


def _inputs(run: RunConfig) -> Iterator[tuple[str, Path]]:
    for prefix in run.data.prefixes:
        yield "data.train" if prefix in [source.path for source in run.data.sources] else "data.valid", prefix
    if run.start is not None:
        yield "start", run.start


def _found(path: Path, folder: Path) -> Path:
    is_elsewhere = not path.is_absolute() and not _exists(path) and _exists(folder / path)
    return folder / path if is_elsewhere else path


def _exists(path: Path) -> bool:
    return path.exists() or any(Path(f"{path}{suffix}").exists() for suffix in _STORE)
