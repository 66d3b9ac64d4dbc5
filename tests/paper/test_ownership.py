"""One `reproduce` per folder, and no processes of a killed one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_style.base.errors import UserError
from megatron_style.paper.work.ownership import end_orphans, job_environment, sole_owner

# A process and its child, as a launcher and its ranks; it says when both are there.
FAMILY = "import subprocess, sys; child = subprocess.Popen(['sleep', '60']); print(child.pid, flush=True); child.wait()"


def start(folder: Path) -> tuple[subprocess.Popen[str], int]:
    environment = {**os.environ, **job_environment(folder)}
    parent = subprocess.Popen([sys.executable, "-c", FAMILY], env=environment, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    return parent, int(parent.stdout.readline())


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_what_a_killed_one_has_left_is_ended_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mine, other = tmp_path / "mine", tmp_path / "mine2"
    orphan, grandchild = start(mine)
    stranger, its_child = start(other)
    try:
        monkeypatch.chdir(tmp_path)
        end_orphans(Path("mine"))  # the same folder by another name
        assert orphan.wait(timeout=10) == -9
        assert not runs(grandchild)
        assert runs(stranger.pid)
        assert runs(its_child)
        assert capsys.readouterr().err.split(": ")[1].split() == [f"{orphan.pid},", str(grandchild)]
        end_orphans(mine)
        assert capsys.readouterr().err == ""
    finally:
        end_orphans(other)
    assert stranger.wait(timeout=10) == -9


def test_a_folder_has_one_owner_at_a_time(tmp_path: Path) -> None:
    with sole_owner(tmp_path / "out"):
        expected = pytest.raises(UserError, match="another `reproduce` uses it; wait, or choose another folder")
        with expected, sole_owner(tmp_path / "out"):
            pass
        with sole_owner(tmp_path / "other"):
            pass
    with sole_owner(tmp_path / "out"):
        pass
