"""The lock of a folder: one owner, and none that is dead."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from megatron_style.parallel.local_ranks import run_ranks
from megatron_style.supervision.lock import STALE_SECONDS, FolderLock, Owner
from megatron_style.supervision.process import Process, started_at, this_process
from megatron_style.supervision.run_guard import guard_run
from megatron_style.supervision.signals import StopSignals

ELSEWHERE = Process("node-7", "another boot", 123, 456)


class Time:
    """A clock that goes on when someone sleeps; the other host may do something meanwhile."""

    def __init__(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        self.now, self._meanwhile = 1000.0, meanwhile

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self._meanwhile()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "lock.json"


def held_by(path: Path, process: Process) -> None:
    path.parent.mkdir()
    path.write_text(json.dumps(asdict(Owner(**vars(process), since="2026-01-02T03:04:05"))))


def test_one_owner_at_a_time_and_nothing_is_left(path: Path) -> None:
    first, second = FolderLock(path), FolderLock(path)
    assert first.take() is None
    refusal = second.take()
    assert refusal is not None
    assert "\n" not in refusal
    assert f"pid {os.getpid()} on {this_process().host}, since 20" in refusal
    second.release()
    assert path.exists(), "only its owner can release a lock"
    first.release()
    assert not path.parent.exists()


def test_a_dead_owner_of_this_host_is_noticed_at_once(path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    held_by(path, replace(this_process(), pid=child.pid, started=started_at(child.pid)))
    assert "another run is at work" in str(FolderLock(path).take())
    child.kill()
    child.wait()
    assert FolderLock(path).take() is None


def test_a_killed_owner_that_was_not_reaped_is_gone(path: Path) -> None:
    """In a container whose first process reaps nobody it stays a zombie."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    held_by(path, replace(this_process(), pid=child.pid, started=started_at(child.pid)))
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert FolderLock(path).take() is None
    child.wait()


def test_a_pid_that_was_given_to_another_process_is_not_the_owner(path: Path) -> None:
    held_by(path, replace(this_process(), started=this_process().started - 1))
    assert FolderLock(path).take() is None


def test_a_lock_of_another_host_that_no_process_touches_is_abandoned(path: Path) -> None:
    held_by(path, ELSEWHERE)
    time = Time()
    assert FolderLock(path, clock=time.clock, sleep=time.sleep).take() is None
    assert time.now - 1000 == pytest.approx(STALE_SECONDS, abs=3)


def test_a_lock_of_another_host_that_is_touched_is_respected(path: Path) -> None:
    """Whatever that host's clock says: it is years behind."""
    held_by(path, ELSEWHERE)
    touches = iter(range(1, 100))
    time = Time(meanwhile=lambda: os.utime(path, (next(touches), 0)))
    refusal = FolderLock(path, clock=time.clock, sleep=time.sleep).take()
    assert "pid 123 on node-7, since 2026-01-02T03:04:05" in str(refusal)
    assert time.now - 1000 < 10


def test_a_lock_that_is_torn_opens_too(path: Path) -> None:
    path.parent.mkdir()
    path.write_text("")
    time = Time()
    assert FolderLock(path, clock=time.clock, sleep=time.sleep).take() is None


def test_an_owner_notices_that_its_lock_is_anothers(path: Path) -> None:
    lock = FolderLock(path)
    assert lock.take() is None
    assert lock.refresh() is None
    path.write_text(json.dumps(asdict(Owner(**vars(ELSEWHERE), since="now"))))
    assert "pid 123 on node-7" in str(lock.refresh())


def enter(folder: Path) -> str:
    try:
        with guard_run(folder, StopSignals()):
            return "entered"
    except ValueError as error:
        return str(error)


def test_all_ranks_are_refused_together(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path / "run" / "lock.json")
    assert lock.take() is None
    told = run_ranks(2, enter, tmp_path / "run")
    assert told[0] == told[1]
    assert "another run is at work there" in told[0]
    assert [each.name for each in (tmp_path / "run").iterdir()] == ["lock.json"]
    lock.release()
    assert run_ranks(2, enter, tmp_path / "run") == ["entered"] * 2
