"""Atomic files and folders: they appear complete or not at all; and what is said when their disk is full."""

from __future__ import annotations

import errno
import glob
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from megatron_style.base.errors import RunFailed
from megatron_style.base.units import size

DEFAULT_CACHE = Path("~/.cache/megatron_style")  # of the user: downloads, and records of stores in read-only folders
_FULL = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """Yield a temporary folder next to `target`, which replaces it when the body is done; an error removes it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=_prefix(target), dir=target.parent))
    try:
        yield temporary
        temporary.chmod(0o777 & ~_umask())  # mkdtemp makes private folders
        put_in_place(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def remove_leftovers(target: Path) -> None:
    """Remove the temporary folders of killed writers of `target`. The caller must know that none is at work now."""
    for folder in target.parent.glob(f"{glob.escape(_prefix(target))}*"):
        shutil.rmtree(folder)


def _prefix(target: Path) -> str:
    return f".{target.name}.partial."


def put_in_place(new: Path, target: Path) -> None:
    """Rename a complete file or folder to `target`. An existing one is moved aside first, and back if that fails."""
    _flush_to_disk(new)
    if not target.exists():
        new.rename(target)
    else:
        with tempfile.TemporaryDirectory(prefix=_prefix(target), dir=target.parent) as aside:
            old = Path(aside) / target.name
            target.rename(old)
            try:
                new.rename(target)
            except BaseException:
                old.rename(target)
                raise
    sync(target.parent)


def _flush_to_disk(new: Path) -> None:
    """Flush the data before the rename, which may otherwise reach the disk first."""
    for path in [*new.rglob("*"), new]:
        sync(path)


def sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _umask() -> int:
    mask = os.umask(0)  # the only way to read it is to set it
    os.umask(mask)
    return mask


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield the name of a file to write, which replaces `path` when the body is done. On any error it is removed; one
    that a kill leaves is overwritten by the next write."""
    if path.exists() and not path.is_file():  # a pipe or a device cannot be replaced
        yield path
        return
    target = path.resolve()  # so that a symbolic link stays one
    new = target.with_name(f".{target.name}.new")
    try:
        yield new
        new.replace(target)
    finally:
        new.unlink(missing_ok=True)


def write_atomic(path: Path, text: str) -> None:
    with atomic_file(path) as new:
        new.write_text(text, encoding="utf-8", newline="\n")


class StreamedFile:
    """A file that is written as a stream."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def sync(self) -> None:
        """Return when everything is on the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._file.close()
            return
        with suppress(OSError):  # closing flushes, which fails again on a full disk and would hide the first error
            self._file.close()


def room_at(path: Path) -> str:
    """Say how much space the disk of a path has, which need not exist."""
    place = path.absolute()
    while not place.exists():
        place = place.parent
    usage = shutil.disk_usage(place)
    while not place.is_mount():
        place = place.parent
    return f"the disk mounted at {place} has {size(usage.free)} of {size(usage.total)} free"


@contextmanager
def writing_to(path: Path) -> Iterator[None]:
    """Turn the error of a full disk into one that names the disk and what to do."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise RunFailed(
            f"{path}: cannot be written ({error.strerror}): {room_at(path)}; free some, or choose another disk"
        ) from error
