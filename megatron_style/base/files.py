"""Files and folders that appear complete or not at all, also on a full disk."""

from __future__ import annotations

import glob
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """A temporary folder beside `target`, which takes its place when the body is done. On any error it is removed."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=_prefix(target), dir=target.parent))
    try:
        yield temporary
        temporary.chmod(0o777 & ~_umask())  # mkdtemp's are private
        put_in_place(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def remove_leftovers(target: Path) -> None:
    """Remove what writers of `target` left when they were killed. For those who know that nobody else writes it now."""
    for folder in target.parent.glob(f"{glob.escape(_prefix(target))}*"):
        shutil.rmtree(folder)


def _prefix(target: Path) -> str:
    return f".{target.name}.partial."


def put_in_place(new: Path, target: Path) -> None:
    """Rename a whole file or folder. One that is in the way is moved aside first, and back again if that fails."""
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
    """A rename may reach the disk before the data does, unless the data was sent there first."""
    for path in [*new.rglob("*"), new]:
        sync(path)


def sync(path: Path) -> None:
    """Send a file, or the names in a folder, to the disk."""
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
    """Yield the name of a file to write, which takes the place of `path` when the body is done. On any error it is
    removed; one that a kill leaves is replaced by the next write."""
    if path.exists() and not path.is_file():  # a pipe or a device has no other name
        yield path
        return
    target = path.resolve()  # a link stays one
    new = target.with_name(f".{target.name}.new")
    try:
        yield new
        new.replace(target)
    finally:
        new.unlink(missing_ok=True)


def write_atomic(path: Path, text: str) -> None:
    with atomic_file(path) as new:
        new.write_text(text, encoding="utf-8", newline="\n")
