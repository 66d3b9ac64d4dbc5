"""DeepSpeed's checkpoint, written into files that may be in memory, and the counters that it holds in addition to
weights and optimizer state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, Protocol

import torch

_Method = tuple[Any, str, Callable[..., Any]]  # an object, the name of its method, and what replaces it


@dataclass(frozen=True)
class Counters:
    global_steps: int
    global_samples: int
    skipped_steps: int
    loss_scaler: Mapping[str, Any]  # of fp16
    scheduler: Mapping[str, Any]  # of the ds_config, if it has one
    rates: tuple[Mapping[str, Any], ...]  # what such a scheduler sets, for each parameter group


class SavedFiles(Protocol):
    """The files of a checkpoint. They may be in memory at first; then what is to be done on the disk is done later."""

    folder: Path

    def open(self, name: str) -> AbstractContextManager[IO[bytes]]: ...

    def do(self, task: Callable[[], None]) -> None: ...


def save(engine: Any, files: SavedFiles) -> None:
    """Let DeepSpeed's engine write its checkpoint into these files. All ranks call it."""

    def save_into(state_dict: Any, path: str) -> None:
        with files.open(Path(path).name) as file:
            torch.save(state_dict, file)

    copy_tools = engine._copy_recovery_script
    replaced: list[_Method] = [
        (engine.checkpoint_engine, "save", save_into),
        (engine.checkpoint_engine, "makedirs", _nothing),  # the folder may be made later
        (engine, "_copy_recovery_script", lambda path: files.do(partial(copy_tools, path))),
    ]
    if engine.zero_optimization_stage() == 3:
        # DeepSpeed releases the small parameters that it keeps gathered, only to save placeholders for them, and then
        # gathers them again one by one.
        replaced += [
            (engine.optimizer, "checkpoint_event_prologue", _nothing),
            (engine.optimizer, "checkpoint_event_epilogue", _nothing),
            (engine, "module_state_dict", partial(_with_placeholders, engine.module_state_dict, engine.module)),
        ]
    with _methods(replaced), _without_checksums():
        engine.save_checkpoint(str(files.folder.parent), tag=files.folder.name, save_latest=False)


def _with_placeholders(state_dict: Callable[..., dict[str, Any]], module: torch.nn.Module, **how: Any) -> Any:
    """Return the state of a module that ZeRO 3 has partitioned: its parameters are in the files of the optimizer."""
    found = state_dict(**how)
    for name, _ in module.named_parameters(remove_duplicate=False):
        found[name] = found[name].new_empty(0)
    return found


def _nothing(*_: Any, **__: Any) -> None: ...


@contextmanager
def _methods(replaced: Sequence[_Method]) -> Iterator[None]:
    """Replace methods of objects for a while."""
    for holder, name, method in replaced:
        setattr(holder, name, method)
    try:
        yield
    finally:
        for holder, name, _ in replaced:
            delattr(holder, name)  # uncovers the method of the class


@contextmanager
def _without_checksums() -> Iterator[None]:
    """Let torch write no checksums: the manifest has better ones, and these halve the speed."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)
