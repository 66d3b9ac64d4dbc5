"""Our launcher for one host: each rank knows its place, and all end when one fails."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.launch import ROOT, plain_environment

RANK = """
import os, pathlib, sys, time
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "CROSS_SIZE")
pathlib.Path(sys.argv[1], os.environ["RANK"]).write_text(" ".join(os.environ[name] for name in names))
"""
FAILS = {
    "by itself": ("sys.exit(76)", 76),
    "by a signal": ("os.kill(os.getpid(), 9)", 137),
}


def launched(folder: Path, then: str = "") -> int:
    (folder / "rank.py").write_text(RANK + then)
    command = [sys.executable, "-m", "megatron_style.hosts.local", "2", "rank", str(folder)]
    environment = plain_environment(PYTHONPATH=f"{ROOT}:{folder}")
    return subprocess.run(command, env=environment, timeout=60).returncode


def test_each_rank_knows_its_place(tmp_path: Path) -> None:
    assert launched(tmp_path) == 0
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == ["0 0 2 127.0.0.1 1", "1 1 2 127.0.0.1 1"]


@pytest.mark.parametrize(("failure", "code"), FAILS.values(), ids=FAILS.keys())
def test_when_a_rank_fails_the_others_end_and_its_code_is_that_of_the_launch(
    tmp_path: Path, failure: str, code: int
) -> None:
    last = tmp_path / "last"
    wait = "time.sleep(50)"
    assert (
        launched(tmp_path, f"if os.environ['RANK'] == '1': {failure}\n{wait}\npathlib.Path({str(last)!r}).touch()")
        == code
    )
    assert not last.exists()
