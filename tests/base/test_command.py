"""Behaviour that all commands share."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from megatron_style.base.command import LAST_WORDS, log, run_command, say, show, show_table
from megatron_style.base.errors import UserError, harmless


@pytest.mark.parametrize("name", ["LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID", "MPI_LOCALRANKID"])
@pytest.mark.parametrize("rank", [0, 1])
def test_wrong_input_is_reported_once_per_host(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str, rank: int
) -> None:
    def wrong() -> None:
        raise UserError("model.layers: holds -1")

    monkeypatch.setenv(name, str(rank))
    monkeypatch.setenv(LAST_WORDS, str(tmp_path))
    with pytest.raises(SystemExit) as left:
        run_command(wrong)
    assert left.value.code == 2
    assert capsys.readouterr().err == ("" if rank else "error: model.layers: holds -1\n")
    kept = (tmp_path / "2").read_text()  # by each rank: a launcher may end the first one before it finds the mistake
    assert kept == "error: model.layers: holds -1"


@pytest.mark.parametrize("rank", [0, 1])
def test_torchruns_own_summary_says_the_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, rank: int
) -> None:
    """Under plain torchrun, whose last lines are a summary of each process: by its contract, read by its own class."""

    def wrong() -> None:
        raise UserError("model.layers: holds -1")

    file = tmp_path / "error.json"
    monkeypatch.setenv("LOCAL_RANK", str(rank))
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    with pytest.raises(SystemExit):
        run_command(wrong)
    failure = ProcessFailure(local_rank=rank, pid=1, exitcode=2, error_file=str(file))
    assert "error: model.layers: holds -1" in ChildFailedError("train", {rank: failure}).format_msg()
    assert failure.timestamp > 0
    capsys.readouterr()


def test_a_log_that_goes_to_a_full_disk_ends_nothing() -> None:
    script = "from megatron_style.base.command import log; log('one'); log('two'); print('done')"
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=full, text=True)
    assert done.stdout == "done\n"


HOSTILE = "a\x1b]0;title\x07b\x9b2Jc\rd\u202ee"
ESCAPED = r"a\x1b]0;title\x07b\x9b2Jc\rd\u202ee"


class FakeTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_only_control_characters_are_escaped() -> None:
    assert harmless(HOSTILE) == ESCAPED
    kept = "two\nlines,\ta tab, \u00a0\u3000\u200d and \u00e9\u4e2d"
    assert harmless(kept) == kept
    assert harmless("\udc80") == r"\udc80"


def test_messages_cannot_act_on_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """Nor when somebody looks at a log later."""
    log(f"warning: {HOSTILE}")
    assert capsys.readouterr().err == f"warning: {ESCAPED}\n"


def test_results_cannot_act_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program gets them as they are."""
    for stream, told in ((FakeTerminal(), ESCAPED), (io.StringIO(), HOSTILE)):
        monkeypatch.setattr(sys, "stdout", stream)
        say(HOSTILE)
        show({"output": HOSTILE}, as_json=False)
        show_table(("name", "tokens"), [(HOSTILE, 1)])
        assert stream.getvalue().count(told) == 3
        assert ("\x1b" in stream.getvalue()) == (told == HOSTILE)
