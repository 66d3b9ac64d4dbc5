"""`kill -9` of any process of a launch: the others end, and a supervised run loses nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from megatron_style.config.run import RunConfig
from megatron_style.supervision.record import RankRecord, read_records, read_status
from megatron_style.train import main as train
from tests.support.launch import ROOT, free_port
from tests.support.resuming import expect_bitwise, make_run, on_ranks
from tests.support.tiny import run_here

pytestmark = pytest.mark.slow
ENVIRONMENT = {"PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
DEEPSPEED = ("-m", "deepspeed.launcher.runner", "--num_accelerators", "2", "--module", "megatron_style.train")
SUPERVISOR = ("-m", "megatron_style.supervise", "--processes", "2", "--pause", "1s")


def long_run(folder: Path, name: str = "run", *, steps: int = 200) -> RunConfig:
    output = {"save_every": 20, "evaluate_every": 100, "heartbeat_timeout": 6.0}
    run = make_run(folder, name, data=2, steps=steps, dropout=True, output=output)
    (folder / f"{name}.yaml").write_text(json.dumps(run.as_data()))  # JSON is YAML
    return run


@contextmanager
def started(folder: Path, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    """With what it says in `told`. Its whole session is ended, whatever happens."""
    words = (sys.executable, *words, str(folder / "run.yaml"))
    with (folder / "told").open("wb") as told:
        process = subprocess.Popen(
            words, cwd=ROOT, env=os.environ | ENVIRONMENT, stdout=told, stderr=told, start_new_session=True
        )
    try:
        yield process
    finally:
        for record in records(folder):
            record.send(signal.SIGKILL)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def records(folder: Path) -> list[RankRecord]:
    return [seen.record for seen in read_records(folder / "run").values()]


def ranks_at(folder: Path, step: int, process: subprocess.Popen[bytes]) -> list[RankRecord]:
    """The ranks of a launch that has done so many steps, and lives."""
    until = time.monotonic() + 120
    while time.monotonic() < until:
        assert process.poll() is None, (folder / "told").read_text()
        found = records(folder)
        metrics = folder / "run" / "metrics.jsonl"
        if len(found) == 2 and not any(record.is_gone for record in found) and metrics.exists():
            lines = metrics.read_text().split("\n")[:-1]
            if lines and json.loads(lines[-1])["step"] >= step:
                return found
        time.sleep(0.1)
    raise AssertionError((folder / "told").read_text())


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def all_gone(ranks: list[RankRecord], seconds: float) -> bool:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if all(rank.is_gone for rank in ranks):
            return True
        time.sleep(0.1)
    return False


def test_a_second_run_is_refused_and_kill_9_of_a_rank_ends_the_launch(folder: Path) -> None:
    long_run(folder, steps=4000)
    with started(folder, *DEEPSPEED[:2], "--master_port", str(free_port()), *DEEPSPEED[2:]) as launcher:
        ranks = ranks_at(folder, 5, launcher)
        second = run_here(train, folder / "run.yaml")
        assert second.code == 2
        (refusal,) = [line for line in second.err.splitlines() if "error" in line]
        assert f"another run is at work there: pid {ranks[0].pid} on {ranks[0].host}, since 20" in refusal
        ranks[1].send(signal.SIGKILL)
        assert all_gone(ranks, 30)
        assert launcher.wait(30) != 0
    told = [line for line in (folder / "told").read_text().splitlines() if "last heard of" in line]
    assert len(told) == 1
    assert f"error: rank 1 on {ranks[1].host} (pid {ranks[1].pid}) was killed; last heard of at step" in told[0]
    status = read_status(folder / "run")
    assert status is not None
    assert status.state == "failed"


@pytest.mark.sweep  # tests/cluster has a run over hosts that meets worse
@pytest.mark.parametrize("kills", [[(30, 1)], [(30, 0), (80, 1), (130, 2)]], ids=["once", "thrice"])
def test_a_supervised_run_that_is_killed_equals_one_that_was_not(folder: Path, kills: list[tuple[int, int]]) -> None:
    """0: a rank; 1: the launcher's process on its host, which gives exit code 0 and orphans; 2: the launcher itself."""
    whole, run = long_run(folder, "whole"), long_run(folder)
    on_ranks(whole, 2)
    with started(folder, *SUPERVISOR) as supervisor:
        for step, levels in kills:
            ranks = ranks_at(folder, step, supervisor)
            pid = ranks[1].pid
            for _ in range(levels):
                pid = parent_of(pid)
            os.kill(pid, signal.SIGKILL)
            assert all_gone(ranks, 30)
        assert supervisor.wait(120) == 0, (folder / "told").read_text()
        assert all_gone(records(folder), 1)
    assert f"finished at step 200, in attempt {len(kills) + 1}" in (folder / "told").read_text()
    expect_bitwise(run, whole)


@pytest.mark.sweep
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_supervisor_that_is_asked_to_stop_leaves_no_process(folder: Path, number: int) -> None:
    run = long_run(folder, steps=4000)
    with started(folder, *SUPERVISOR) as supervisor:
        ranks = ranks_at(folder, 25, supervisor)
        supervisor.send_signal(number)
        assert supervisor.wait(60) == 75
        assert all_gone(ranks, 1)
    status = read_status(run.output.path)
    assert status is not None
    assert status.state == "stopped"
    assert not (run.output.path / "supervisor.json").exists()


@pytest.mark.sweep
@pytest.mark.parametrize(("seconds", "survives"), [(3, True), (12, False)])
def test_a_rank_that_is_held_up_is_waited_for_but_not_for_ever(folder: Path, seconds: int, survives: bool) -> None:
    long_run(folder, steps=4000)
    with started(folder, *DEEPSPEED[:2], "--master_port", str(free_port()), *DEEPSPEED[2:]) as launcher:
        ranks = ranks_at(folder, 5, launcher)
        ranks[1].send(signal.SIGSTOP)
        time.sleep(seconds)
        assert ranks[0].is_gone is not survives
        ranks[1].send(signal.SIGCONT)
        time.sleep(3)
        assert all_gone(ranks, 40 if not survives else 0.5) is not survives
