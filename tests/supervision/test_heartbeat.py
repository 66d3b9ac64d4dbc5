"""A rank that stops is noticed, a slow one is waited for, and every rank keeps a log."""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megatron_style.base.errors import RunFailed, Stopped, UserError
from megatron_style.hosts.board import Board, new_board, open_board
from megatron_style.parallel.local_ranks import run_ranks
from megatron_style.supervision.heartbeat import Heartbeat, Watch
from megatron_style.supervision.process import Process
from megatron_style.supervision.record import RankRecord, Seen, read_records, read_status
from megatron_style.supervision.run_guard import guard_run
from megatron_style.supervision.signals import StopSignals

TIMEOUT = 3.0  # seconds; of runs, which the tests wait for
ELSEWHERE = Process("node-7", "another boot", 123, 456)


def board_of(slots: int, own: int) -> Board:
    with new_board(slots) as path:
        return open_board(path, slots, own)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Others:
    """Rank 5 on another host, looked at every two seconds."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.watch = Watch("this launch", self.clock)
        self.record = RankRecord(**vars(ELSEWHERE), rank=5, launch="this launch", step=7, phase="training", time="")

    def pass_time(self, seconds: int, **changes: Any) -> list[str]:
        """The losses at the end; with `beats`, the rank lives."""
        losses = []
        for _ in range(seconds // 2):
            self.clock.now += 2
            beats = self.record.beats + changes.get("beats", 0)
            self.record = replace(self.record, **{**changes, "beats": beats})
            losses = self.watch.look({5: Seen(self.record, (0, repr(self.record).encode()))})
        return [str(loss) for loss in losses]


def test_a_rank_of_another_host_is_lost_after_15_seconds_of_silence() -> None:
    others = Others()
    assert others.pass_time(60, beats=1) == []
    assert others.pass_time(14) == []
    (told,) = others.pass_time(4)
    assert told.startswith("rank 5 on node-7 (pid 123) sent no heartbeat for 18 s")
    assert told.endswith("last heard of at step 7, training")


def test_a_rank_that_failed_is_lost_at_once_and_one_that_ended_never() -> None:
    assert Others().pass_time(2, phase="failed", during="saving", error="OSError: full") == [
        "rank 5 on node-7 (pid 123) failed at step 7, saving: OSError: full"
    ]
    assert Others().pass_time(100, phase="ended") == []


def test_a_rank_that_only_lost_its_connection_is_not_the_cause() -> None:
    assert Others().pass_time(100, phase="failed", follows="waiting") == []


def test_what_a_launch_before_left_does_not_count() -> None:
    assert Others().pass_time(100, launch="the one before", phase="failed") == []


def test_when_all_slept_no_rank_is_lost() -> None:
    others = Others()
    others.pass_time(4, beats=1)
    others.clock.now += 3600  # a machine that was suspended: whoever wakes first sees no beats of the others
    assert others.pass_time(2) == []
    assert others.pass_time(16) != []


def test_a_folder_that_is_not_shared_is_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("megatron_style.supervision.heartbeat.APPEAR_SECONDS", 0.0)
    heartbeat = Heartbeat(tmp_path, rank=0, launch="this launch", hosts=[[0], [1, 2]], board=board_of(1, 0))
    for _ in range(2):
        heartbeat._warn_of_missing_ranks()
    (told,) = capsys.readouterr().err.splitlines()
    assert "no record of 2 ranks (first: rank 1): output.path is not shared" in told


def body(folder: Path, what: str, whom: int) -> None:
    with guard_run(folder, StopSignals(), timeout=TIMEOUT) as (heartbeat, _):
        heartbeat.at(3, "training")
        if dist.get_rank() == whom:
            while read_records(folder)[whom].record.step != 3:
                time.sleep(0.05)
            if what == "raises":
                raise RunFailed("the disk is full")
            if what == "stopped":
                os.kill(os.getpid(), signal.SIGSTOP)
            os.kill(os.getpid(), signal.SIGKILL)
        while True:
            time.sleep(0.1)  # as in a collective that never comes back


def ends_in(folder: Path, what: str, whom: int) -> float:
    """Ranks without a launcher that would end them: only they themselves can."""
    fork = multiprocessing.get_context("fork")

    def rank(number: int) -> None:
        sys.stderr = (folder / f"told{number}").open("w", buffering=1)
        dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=number, world_size=3)
        body(folder / "run", what, whom)

    ranks = [fork.Process(target=rank, args=(number,)) for number in range(3)]
    for process in ranks:
        process.start()
    while 3 not in {seen.record.step for seen in read_records(folder / "run").values()}:
        time.sleep(0.1)
    begin = time.monotonic()
    for number, process in enumerate(ranks):
        if number != whom or what != "stopped":
            process.join(40)
            assert process.exitcode, f"rank {number} did not end"
    seconds = time.monotonic() - begin
    ranks[whom].kill()
    return seconds


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "whom", "told"),
    [
        ("killed", 0, "was killed; last heard of at step 3, training"),
        ("raises", 1, "failed at step 3, training: RunFailed: the disk is full"),
        ("stopped", 1, "sent no heartbeat for"),
        pytest.param("stopped", 0, "sent no heartbeat for", marks=pytest.mark.sweep),
        pytest.param("raises", 0, "failed at step 3, training: RunFailed: the disk is full", marks=pytest.mark.sweep),
        pytest.param("killed", 2, "was killed; last heard of at step 3, training", marks=pytest.mark.sweep),
    ],
)
def test_when_one_rank_stops_the_others_end_and_one_says_why(tmp_path: Path, what: str, whom: int, told: str) -> None:
    assert ends_in(tmp_path, what, whom) < 30
    said = {number: (tmp_path / f"told{number}").read_text() for number in range(3) if number != whom}
    first, second = sorted(said)
    assert f"error: rank {whom} on " in said[first]
    assert told in said[first]
    assert said[first].count("\n") == 1
    assert said[second] == ""
    assert told in (tmp_path / "run" / "logs" / f"rank_{first:05d}.log").read_text()
    if whom:
        status = read_status(tmp_path / "run")
        assert status is not None
        assert (status.state, status.step) == ("failed", 3)
        assert not (tmp_path / "run" / "lock.json").exists()
    if what == "raises":
        assert "RunFailed: the disk is full" in (tmp_path / "run" / "logs" / f"rank_{whom:05d}.log").read_text()


def slow(folder: Path) -> None:
    """In seconds of the clock: work would take longer than the timeout on a machine that has other work."""
    with guard_run(folder, StopSignals(), timeout=2 * TIMEOUT) as (heartbeat, _):
        heartbeat.at(1, "saving")
        if dist.get_rank():
            ctypes.PyDLL(None).usleep(1_500_000)  # holds the interpreter's lock for several beats, inside one call
        dist.barrier()


@pytest.mark.slow
def test_a_slow_rank_is_waited_for_and_a_normal_end_is_logged(tmp_path: Path) -> None:
    run_ranks(2, slow, tmp_path)
    assert [seen.record.phase for seen in read_records(tmp_path).values()] == ["ended", "ended"]
    status = json.loads((tmp_path / "status.json").read_text())
    assert (status["state"], status["step"]) == ("finished", 1)
    run_ranks(2, slow, tmp_path)
    assert (tmp_path / "logs" / "rank_00001.log").read_text().count("begins: ") == 2


def leaves(folder: Path, error: Exception) -> str:
    try:
        with guard_run(folder, StopSignals()):
            raise error
    except type(error) as caught:
        return str(caught)


def test_a_run_that_was_asked_to_stop_says_so(tmp_path: Path) -> None:
    assert run_ranks(2, leaves, tmp_path, Stopped("after step 4")) == ["after step 4"] * 2
    status = read_status(tmp_path)
    assert status is not None
    assert (status.state, status.error) == ("stopped", "after step 4")


def test_wrong_input_leaves_nothing(tmp_path: Path) -> None:
    assert run_ranks(2, leaves, tmp_path / "run", UserError("no such file")) == ["no such file"] * 2
    assert list(tmp_path.iterdir()) == []


def test_wrong_input_in_a_run_that_has_begun_is_kept(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").touch()
    run_ranks(2, leaves, tmp_path, UserError("does not fit into memory"))
    assert {seen.record.error for seen in read_records(tmp_path).values()} == {"UserError: does not fit into memory"}
    assert "does not fit" in (tmp_path / "logs" / "rank_00001.log").read_text()
    assert read_status(tmp_path) is None
