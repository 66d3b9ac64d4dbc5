"""Heartbeats of thousands of ranks: simulated, with hosts and a clock of our own, and each operation on the shared disk
counted."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from megatron_style.base.run_folder import RunFolder
from megatron_style.hosts.board import Board, new_board
from megatron_style.supervision import record
from megatron_style.supervision.heartbeat import BEATS, TIMEOUT_SECONDS, Heartbeat

RANKS_PER_HOST = 8
INTERVAL = TIMEOUT_SECONDS / BEATS
MOST_PER_SECOND = 3100  # operations of 4,096 ranks, as docs/supervision.md says


class Counting:
    """The module `os`, whose calls are counted."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        if callable(getattr(os, name)):
            self.calls[name] += 1
        return getattr(os, name)


class Cluster:
    """Ranks that beat and look when they are asked to."""

    def __init__(self, folder: Path, hosts: int) -> None:
        RunFolder(folder).ranks.mkdir()
        self.now = 0.0
        self.silent: set[int] = set()  # ranks
        firsts = range(0, hosts * RANKS_PER_HOST, RANKS_PER_HOST)
        self.hosts = [list(range(first, first + RANKS_PER_HOST)) for first in firsts]
        self._stack = ExitStack()
        self.ranks = [heartbeat for ranks in self.hosts for heartbeat in self._of_host(folder, ranks)]

    def _of_host(self, folder: Path, ranks: list[int]) -> Iterator[Heartbeat]:
        with new_board(len(ranks)) as path:
            file = os.open(path, os.O_RDWR)
        self._stack.callback(os.close, file)
        for slot, rank in enumerate(ranks):
            board = Board(file, len(ranks), slot)
            yield Heartbeat(
                folder, rank=rank, launch="this launch", hosts=self.hosts, board=board, clock=lambda: self.now
            )

    def pass_beat(self) -> list[list[str]]:
        """Let all ranks beat, and all look. Return what each has found."""
        self.now += INTERVAL
        awake = [heartbeat for rank, heartbeat in enumerate(self.ranks) if rank not in self.silent]
        for heartbeat in awake:
            heartbeat.beat()
        return [[str(loss) for loss in heartbeat.look()] for heartbeat in awake]

    def close(self) -> None:
        self._stack.close()


@pytest.fixture
def cluster(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    made = Cluster(tmp_path, request.param)
    yield made
    made.close()


@pytest.mark.parametrize("cluster", [64, pytest.param(512, marks=pytest.mark.sweep)], indirect=True)
def test_ranks_stay_within_the_stated_operations_per_second(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """The operations are in proportion to the hosts: 64 of them show what 512, with 4,096 ranks, would do."""
    hosts = len(cluster.hosts)
    cluster.pass_beat()
    counting = Counting()
    monkeypatch.setattr(record, "os", counting)
    monkeypatch.setattr(RunFolder, "all_host_records", None)  # a listing would fail
    assert cluster.pass_beat() == [[]] * hosts * RANKS_PER_HOST
    names = {"open", "write", "ftruncate", "read", "fstat", "close"}
    calls = {name: count for name, count in counting.calls.items() if not name.startswith("O_")}
    assert set(calls) == names
    assert calls["write"] == hosts
    assert sum(calls.values()) / INTERVAL <= MOST_PER_SECOND * hosts / 512


@pytest.mark.parametrize("cluster", [6], indirect=True)
def test_a_host_that_is_silent_is_lost_to_rank_0_and_only_to_it(cluster: Cluster) -> None:
    for _ in range(3):
        assert not any(cluster.pass_beat())
    cluster.silent = set(cluster.hosts[4])
    began = cluster.now
    while not any(found := cluster.pass_beat()):
        assert cluster.now - began < TIMEOUT_SECONDS
    assert cluster.now - began <= TIMEOUT_SECONDS + INTERVAL
    assert len(found[0]) == RANKS_PER_HOST
    assert [loss.split(" on ")[0] for loss in found[0]] == [f"rank {rank}" for rank in cluster.hosts[4]]
    assert not any(found[1:])


@pytest.mark.parametrize("cluster", [4], indirect=True)
def test_a_silent_rank_is_lost_to_its_own_host_and_to_rank_0(cluster: Cluster) -> None:
    for _ in range(3):
        cluster.pass_beat()
    cluster.silent = {19}
    for _ in range(int(BEATS) + 2):  # what the first rank of a host writes of the others is a beat old
        found = cluster.pass_beat()
    knowing = [rank for rank, losses in zip([*range(19), *range(20, 32)], found, strict=True) if losses]
    assert knowing == [0, 16, 17, 18, 20, 21, 22, 23]
    assert {loss.split(" on ")[0] for losses in found for loss in losses} == {"rank 19"}


@pytest.mark.parametrize("cluster", [4], indirect=True)
def test_when_rank_0_is_silent_the_first_rank_of_every_host_knows(cluster: Cluster) -> None:
    for _ in range(3):
        cluster.pass_beat()
    cluster.silent = set(cluster.hosts[0])
    for _ in range(int(BEATS) + 1):
        found = cluster.pass_beat()
    assert [rank for rank, losses in enumerate(found, start=8) if losses] == [8, 16, 24]
    assert all(losses[0].startswith("rank 0 on ") for losses in found if losses)


@pytest.mark.parametrize("cluster", [2], indirect=True)
def test_a_failure_reaches_the_other_hosts_and_is_reported_by_its_own(cluster: Cluster) -> None:
    cluster.pass_beat()
    cluster.pass_beat()
    cluster.ranks[11].failed("OSError: full")
    cluster.silent = {11}
    for heartbeat in (cluster.ranks[0], cluster.ranks[8], cluster.ranks[12]):
        (loss,) = heartbeat.look()
        assert str(loss).endswith("failed at step 0, preflight: OSError: full")
        assert heartbeat._reports([loss]) is (heartbeat is cluster.ranks[8])


def test_a_silent_rank_was_last_heard_of_at_its_last_step(tmp_path: Path) -> None:
    """Rank 0 has not parsed what it says: only the step was new."""
    made = Cluster(tmp_path, 2)
    for step in range(5):
        made.ranks[8].at(step, "training")
        made.pass_beat()
    made.silent = set(made.hosts[1])
    for _ in range(int(BEATS) + 1):
        found = made.pass_beat()
    assert found[0][0].endswith("last heard of at step 4, training")
    made.close()


def test_a_line_that_is_half_written_is_the_one_before(tmp_path: Path) -> None:
    made = Cluster(tmp_path, 1)
    made.pass_beat()
    path = RunFolder(tmp_path).host_records(0)
    reader = record.HostFile(path)
    before = reader.read()
    complete = path.read_bytes()
    path.write_bytes(complete[:-30])
    assert reader.read() == before
    path.write_bytes(complete)
    assert reader.read() == before
    os.utime(path, (1, 1))  # as the writer does on a full disk
    marks = {seen.mark for seen in reader.read().values()}
    assert not marks & {seen.mark for seen in before.values()}
    path.unlink()
    assert reader.read() == {}
    made.close()


def test_a_long_error_is_cut_to_the_room_there_is(tmp_path: Path) -> None:
    made = Cluster(tmp_path, 1)
    made.ranks[3].failed("ß" * 10_000)
    (seen,) = [seen for rank, seen in record.read_records(tmp_path).items() if rank == 3]
    assert seen.record.error.startswith("ßßß")
    assert 300 < len(seen.record.error) < 1000
    made.close()
