"""What all commands share."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megatron_style.base.command import run_command
from megatron_style.base.errors import UserError


@pytest.mark.parametrize("name", ["LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID"])
@pytest.mark.parametrize("rank", [0, 1])
def test_wrong_input_is_told_once_a_host(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, rank: int
) -> None:
    def wrong() -> None:
        raise UserError("model.layers: holds -1")

    monkeypatch.setenv(name, str(rank))
    with pytest.raises(SystemExit) as left:
        run_command(wrong)
    assert left.value.code == 2
    assert capsys.readouterr().err == ("" if rank else "error: model.layers: holds -1\n")


def test_a_log_that_goes_to_a_full_disk_ends_nothing() -> None:
    script = "from megatron_style.base.command import log; log('one'); log('two'); print('done')"
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=full, text=True)
    assert done.stdout == "done\n"
