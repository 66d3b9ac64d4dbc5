"""What is said when a disk is full: which one, and how much it has."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_style.base.errors import RunFailed
from megatron_style.base.units import size

_FULL = (errno.ENOSPC, errno.EDQUOT)


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
