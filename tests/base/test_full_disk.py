"""A full disk is named, with what it has."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from megatron_style.base.errors import RunFailed
from megatron_style.base.files import room_at, writing_to


def test_the_disk_of_a_path_that_does_not_exist_is_that_of_its_folder(tmp_path: Path) -> None:
    assert room_at(tmp_path / "not" / "yet") == room_at(tmp_path)
    assert room_at(tmp_path).startswith("the disk mounted at /")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_named(tmp_path: Path, number: int) -> None:
    message = r"run: cannot be written \(.*\): the disk mounted at .* free some"
    with pytest.raises(RunFailed, match=message), writing_to(tmp_path / "run"):
        raise OSError(number, os.strerror(number))


def test_another_error_stays(tmp_path: Path) -> None:
    with pytest.raises(PermissionError), writing_to(tmp_path):
        raise PermissionError(errno.EACCES, "no")
