"""What a first start leaves behind when it was only a check, refused or interrupted, and what it says last."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_style.__main__ import COMMANDS
from megatron_style.base.errors import OnlyChecked, UserError
from megatron_style.config.run import RunConfig
from megatron_style.parallel.local_ranks import run_ranks
from megatron_style.train import train
from tests.support.launch import LAUNCH, ROOT, TAKE_A_HOSTFILE, plain_environment, script_environment
from tests.support.resuming import make_run
from tests.support.small_run import write_small_run


def only_check(run: RunConfig) -> None:
    with pytest.raises(OnlyChecked, match="dry run: all stages fit, and nothing was written"):
        train(run, dry_run=True)


def be_refused(run: RunConfig) -> None:
    with pytest.raises(UserError, match="less than one segment of 8"):
        train(run)


@pytest.mark.slow
def test_a_dry_run_and_a_refused_start_leave_nothing(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run_ranks(2, only_check, make_run(folder, "deep/er/run", steps=2, data=2))
    assert "preflight: stage 1:" in capfd.readouterr().err
    assert not (folder / "deep").exists()
    run_ranks(2, be_refused, make_run(folder, "deep/er/run", steps=2, update=4800, data=2))
    assert not (folder / "deep").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["local.sh", "torchrun.sh", "mpi.sh"])
def test_the_error_is_the_last_line_under_every_launcher(name: str, tmp_path: Path) -> None:
    """From the caller's folder, which stays the current one."""
    write_small_run(tmp_path, ranks=2)
    (tmp_path / "hosts").write_text("localhost slots=2\n")
    before = ["hosts"] if name in TAKE_A_HOSTFILE else []
    words = [str(LAUNCH / name), *before, "run.yaml", "--set", "data.train=nowhere", "--set", "output.path=deep/run"]
    variables = script_environment(PROCESSES=2)
    done = subprocess.run(words, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=200)
    assert done.returncode == 2
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"error: data.train: nowhere does not exist; make it with `prepare` (tried {tmp_path}")
    assert not (tmp_path / "deep").exists()


def interrupted_at(mark: str, *words: str) -> tuple[int, str]:
    """Start a command, press Ctrl-C as soon as it has mapped a file of this name, and return its exit code and what it
    wrote to standard error."""
    command = ["env", "--default-signal=INT", *words]
    process = subprocess.Popen(command, cwd=ROOT, env=plain_environment(), stderr=subprocess.PIPE, text=True)
    maps = Path(f"/proc/{process.pid}/maps")
    while process.poll() is None and mark not in maps.read_text():
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    told = process.communicate(timeout=100)[1]
    return process.returncode, told


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="what a process has loaded is read from /proc")
def test_ctrl_c_during_the_imports_leaves_no_traceback() -> None:
    command = (sys.executable, "-m", "megatron_style.evaluate", "model", "--data", "valid")
    assert interrupted_at("libtorch", *command) == (130, "interrupted\n")


def test_ctrl_c_before_the_first_import_of_a_command_leaves_no_traceback() -> None:
    """Each command leaves at Ctrl-C from its first line on, and raises it again when it has been imported."""
    commands = [ROOT / "megatron_style" / f"{name}.py" for name in COMMANDS]
    for path in (*commands, ROOT / "megatron_style" / "supervision" / "launch.py"):
        _, _, block = path.read_text(encoding="utf-8").partition('if __name__ == "__main__":\n')
        assert block.startswith("    from megatron_style import start\n\n    start("), path
    code = (
        "import os, signal, sys\nfrom megatron_style.base import leave_at_ctrl_c, raise_at_ctrl_c\n"
        "leave_at_ctrl_c()\nif sys.argv[1:]:\n    raise_at_ctrl_c()\nos.kill(os.getpid(), signal.SIGINT)"
    )
    for argv, said in (([], "interrupted\n"), (["imported"], "KeyboardInterrupt\n")):
        words = ["env", "--default-signal=INT", sys.executable, "-c", code, *argv]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
        assert done.stderr.endswith(said)
        assert done.returncode in (130, -signal.SIGINT)
        assert ("Traceback" in done.stderr) == bool(argv)
