"""DeepSpeed compiles its extensions silently: announce it, and remove the lock of a compilation that was killed."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from deepspeed.ops.op_builder.builder import OpBuilder
from torch.utils.cpp_extension import _get_build_directory

from megatron_style.base.command import log
from megatron_style.base.launchers import is_first_of_host

_OF_ONE_HOST = frozenset({"ext4", "ext3", "xfs", "btrfs", "zfs", "tmpfs", "overlay"})  # file systems
_LONGEST_SECONDS = 600.0  # of a compilation on another host


@contextmanager
def announced_compilations() -> Iterator[None]:
    """Say what takes so long when DeepSpeed compiles an extension in this context."""
    jit_load = OpBuilder.jit_load

    def announced(builder: OpBuilder, verbose: bool = True) -> Any:
        announce(builder.name, Path(_get_build_directory(builder.name, verbose=False)))
        return jit_load(builder, verbose)

    OpBuilder.jit_load = announced
    try:
        yield
    finally:
        OpBuilder.jit_load = jit_load


def announce(name: str, folder: Path) -> None:
    """Announce the compilation of an extension, if it is not done yet, and remove the lock of a killed one: torch would
    wait for it without end."""
    lock = folder / "lock"
    if lock.exists() and is_stale(lock):
        lock.unlink(missing_ok=True)
        log(f"{lock}: removed; the compilation that took it was killed")
    if is_first_of_host() and not (folder / f"{name}.so").exists():
        log(f"compiling DeepSpeed's extension {name} into {folder}: once, a minute or two")


def is_stale(lock: Path) -> bool:
    """True if no process is left that would remove the lock: torch keeps it open. On a file system that other hosts
    share, one of them may have taken it, unless it is old."""
    try:
        found = lock.stat()
    except FileNotFoundError:
        return False
    if any(_has_open(process, lock) for process in Path("/proc").glob("[0-9]*")):
        return False
    return _file_system(found.st_dev) in _OF_ONE_HOST or time.time() - found.st_mtime > _LONGEST_SECONDS


def _has_open(process: Path, file: Path) -> bool:
    with suppress(OSError):  # it has ended, or is another user's
        return any(handle.samefile(file) for handle in (process / "fd").iterdir() if handle.exists())
    return False


def _file_system(device: int) -> str | None:
    """Return the type of the file system on a device, as in `ext4`."""
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
        words = line.split()
        if words[2] == number:
            return words[words.index("-") + 1]
    return None
