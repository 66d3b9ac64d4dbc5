"""TERM, USR1 and Ctrl-C to the process that started a run: it saves, exits with 75, and no process remains.

Until then the run listens on loopback only."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from megatron_style.supervision.record import RankRecord, read_records, read_status, saved_step
from tests.support.launch import LAUNCH, ROOT, SLURM, TAKE_A_HOSTFILE, script_environment
from tests.support.observed import listening
from tests.support.small_run import write_small_run

pytestmark = pytest.mark.slow
TRAIN = ("--set", "stages.1.steps=50000", "--set", "output.log_every=1000", "--set", "output.heartbeat_timeout=5")
SCRIPTS: dict[str, dict[str, str]] = {
    "local.sh": {"PROCESSES": "2"},
    "torchrun.sh": {"PROCESSES": "2"},
    "mpi.sh": {},
    "slurm.sbatch": SLURM,
    "slurm.sbatch over deepspeed": SLURM | {"VIA": "deepspeed"},
}
ASKED = {"TERM": signal.SIGTERM, "USR1": signal.SIGUSR1, "INT": signal.SIGINT}
ON_SEVERAL_HOSTS = {"slurm.sbatch", "slurm.sbatch over deepspeed"}  # by what the stand-ins of Slurm say
# local.sh is in the suite with the other signals below, and listens in tests/cluster/test_exposure.py.
IN_THE_SUITE = {("torchrun.sh", "INT"), ("slurm.sbatch", "TERM")}
CASES = [
    pytest.param(name, number, id=f"{name}-{number}", marks=() if (name, number) in IN_THE_SUITE else pytest.mark.sweep)
    for name in SCRIPTS
    for number in ASKED
]


@contextmanager
def started(folder: Path, name: str, *flags: str) -> Iterator[subprocess.Popen[bytes]]:
    """A script, or `train` without one, in a process group of its own, as a terminal starts it."""
    run_file = write_small_run(folder, ranks=1 if name == "train" else 2)
    file, _, _ = name.partition(" ")
    hosts = folder / "hosts"
    hosts.write_text("localhost slots=2\n")
    before = [str(hosts)] if file in TAKE_A_HOSTFILE else []
    script = (
        ["bash", str(LAUNCH / file), *before] if name != "train" else [sys.executable, "-m", "megatron_style.train"]
    )
    words = [*script, str(run_file), *TRAIN, *flags]
    with (folder / "told").open("wb") as told:
        process = subprocess.Popen(
            words, cwd=ROOT, env=script_environment(**SCRIPTS.get(name, {})), stdout=told, stderr=told, process_group=0
        )
    try:
        yield process
    finally:
        for record in records(folder):
            record.send(signal.SIGKILL)
        process.kill()
        process.wait()


def records(folder: Path) -> list[RankRecord]:
    return [seen.record for seen in read_records(folder / "run").values()]


def told(folder: Path) -> str:
    return (folder / "told").read_text()


def training(
    folder: Path, process: subprocess.Popen[bytes], ranks: int, observe: Callable[[int], None] = lambda _: None
) -> list[RankRecord]:
    """Return the ranks of a run that has saved its first stage and trains in the second."""
    until = time.monotonic() + 120
    while time.monotonic() < until:
        assert process.poll() is None, told(folder)
        observe(process.pid)
        found = records(folder)
        if len(found) == ranks and all(record.phase == "training" and record.step > 2 for record in found):
            return found
        time.sleep(0.1)
    raise AssertionError(told(folder))


def expect_saved(folder: Path, ranks: list[RankRecord]) -> None:
    status = read_status(folder / "run")
    assert status is not None
    assert status.state == "stopped"
    assert status.step == saved_step(folder / "run")
    assert status.step > 2
    assert [rank.rank for rank in ranks if not rank.is_gone] == []


@pytest.mark.parametrize(("name", "number"), CASES)
def test_a_script_listens_on_loopback_and_hands_a_signal_to_the_run(tmp_path: Path, name: str, number: str) -> None:
    sockets: set[tuple[str, str]] = set()
    with started(tmp_path, name) as process:
        ranks = training(tmp_path, process, 2, observe=lambda pid: sockets.update(listening(pid)))
        process.send_signal(ASKED[number])
        assert process.wait(120) == 75, told(tmp_path)
        expect_saved(tmp_path, ranks)
    if name not in ON_SEVERAL_HOSTS:
        expect_loopback(sockets, name)
    assert ("scontrol requeue 7" in told(tmp_path)) is (name in ON_SEVERAL_HOSTS)
    assert told(tmp_path).count("stage 1 is done") == 1  # one rank speaks
    assert not set(told(tmp_path)) & {"\r", "\x1b"}  # a file is no terminal


def expect_loopback(sockets: set[tuple[str, str]], name: str) -> None:
    """mpirun's own process is Open MPI's matter. For local.sh on a host of a network, see tests/cluster."""
    assert ("rank", "127.0.0.1") in sockets
    ours = sockets if name != "mpi.sh" else {(program, ip) for program, ip in sockets if program == "rank"}
    assert {ip for _, ip in ours} == {"127.0.0.1"}


@pytest.mark.parametrize("name", ["local.sh", *(pytest.param(name, marks=pytest.mark.sweep) for name in SCRIPTS)])
def test_the_second_ctrl_c_ends_at_once_and_says_what_is_lost(tmp_path: Path, name: str) -> None:
    """To the process group, as a terminal sends it. The ranks are held up, so that they cannot save in between."""
    with started(tmp_path, name) as process:
        ranks = training(tmp_path, process, 2)
        ranks[1].send(signal.SIGSTOP)
        os.killpg(process.pid, signal.SIGINT)
        time.sleep(1)
        assert process.poll() is None, told(tmp_path)
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(30) == 130, told(tmp_path)
        assert [rank.rank for rank in ranks if not rank.is_gone] == []
    assert "; the steps after the checkpoint of step 2 are lost" in told(tmp_path)


@pytest.mark.parametrize("name", ["local.sh", pytest.param("torchrun.sh", marks=pytest.mark.sweep)])
def test_a_signal_before_the_run_begins_is_not_lost(tmp_path: Path, name: str) -> None:
    with started(tmp_path, name) as process:
        while b"megatron_style.supervision.launch" not in command_of(process.pid) or not children(process.pid):
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 75, told(tmp_path)
    assert "interrupted at step 0; no checkpoint has been written; nothing was trained" in told(tmp_path)


def test_no_rank_outlives_a_launcher_that_is_killed(tmp_path: Path) -> None:
    with started(tmp_path, "local.sh") as process:
        ranks = training(tmp_path, process, 2)
        (launcher,) = children(process.pid)
        os.kill(launcher, signal.SIGKILL)
        assert process.wait(30) == 1
        assert [rank.rank for rank in ranks if not rank.is_gone] == []


def test_ctrl_c_without_a_launcher(tmp_path: Path) -> None:
    with started(tmp_path, "train", "--local-rank=0") as process:  # a flag that some launchers add
        ranks = training(tmp_path, process, 1)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 75, told(tmp_path)
        expect_saved(tmp_path, ranks)
    assert "launcher: none; processes: 1; hosts: 1" in told(tmp_path)
    step = saved_step(tmp_path / "run")
    assert f"stopped after step {step}: a signal asked for it" in told(tmp_path)


def test_the_second_ctrl_c_without_a_launcher_and_without_a_checkpoint(tmp_path: Path) -> None:
    with started(tmp_path, "train", "--set", "stages.0.steps=5000") as process:
        training(tmp_path, process, 1)
        process.send_signal(signal.SIGINT)
        while is_pending(process.pid, signal.SIGINT):  # the system would merge the two
            pass
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130, told(tmp_path)
    assert "no checkpoint has been written; all " in told(tmp_path)


def is_pending(pid: int, number: signal.Signals) -> bool:
    (mask,) = re.findall(r"ShdPnd:\s*([0-9a-f]+)", Path(f"/proc/{pid}/status").read_text())
    return bool(int(mask, 16) >> (number - 1) & 1)


def command_of(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
