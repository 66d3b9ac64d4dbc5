"""Guard a run: lock its folder, keep a log and a heartbeat of each rank, and record how it ended."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

from megatron_style.base.command import EXIT_INTERRUPTED, log
from megatron_style.base.errors import Diverged, OnlyChecked, Stopped, UserError
from megatron_style.base.run_folder import RunFolder
from megatron_style.base.terminal import Terminal
from megatron_style.hosts.board import Board, new_board, open_board
from megatron_style.parallel.collectives import broadcast_json, gather_json
from megatron_style.supervision.heartbeat import TIMEOUT_SECONDS, Heartbeat
from megatron_style.supervision.lock import FolderLock, remove_if_empty
from megatron_style.supervision.process import this_process
from megatron_style.supervision.rank_log import rank_log
from megatron_style.supervision.record import State, Status, now, what_is_lost, write_status
from megatron_style.supervision.signals import StopSignals

_SIGNS_OF_A_LOST_PEER = ("gloo", "NCCL", "Connection closed by peer", "Connection reset", "Broken pipe", "ProcessGroup")


@contextmanager
def guard_run(
    folder: Path, signals: StopSignals, *, timeout: float = TIMEOUT_SECONDS
) -> Iterator[tuple[Heartbeat, Terminal | None]]:
    """Yield the heartbeat of this rank and the terminal that shows its progress, if there is one. When a rank is lost,
    the others end within twice the timeout, and one of them reports which it was."""
    launch = _begin(RunFolder(folder))
    try:
        with rank_log(folder, dist.get_rank(), launch.name) as terminal, _hosts_and_board() as (hosts, board):
            heartbeat = Heartbeat(
                folder,
                rank=dist.get_rank(),
                launch=launch.name,
                hosts=hosts,
                board=board,
                timeout=timeout,
                every_beat=launch.refresh_lock,
                before_leaving=launch.fails,
            )
            signals.react = lambda: _end_at_once(folder, heartbeat.step) if signals.ends_at_once else None
            heartbeat.beat()
            dist.barrier()  # every rank is on the board of its host
            heartbeat.publish()  # from here on the ranks may be asked to stop
            dist.barrier()  # every rank has its record: one that is missing from now on is lost
            heartbeat.start()
            try:
                yield heartbeat, terminal
                dist.barrier()  # no rank stops watching while another one still works
            except BaseException as error:
                _record_failure(launch, heartbeat, error)
                raise
            heartbeat.ended()
            launch.ends("finished", heartbeat.step)
    finally:
        launch.leave()


@dataclass(frozen=True)
class _Launch:
    folder: RunFolder
    name: str
    lock: FolderLock | None  # rank 0 holds it
    made: tuple[Path, ...] = ()  # folders that this launch has made around the run's, the inner ones first

    def ends(self, state: State, step: int, error: str = "") -> None:
        """Record on rank 0 how the launch ended. A supervisor needs it: a launcher may exit with 0 after a kill."""
        if self.lock is None:
            return
        try:
            write_status(self.folder.path, Status(self.name, state, step, now(), error))
        except OSError as problem:
            log(f"warning: {self.folder.status.name} could not be written: {problem}")
        self.lock.release()

    def refresh_lock(self) -> str | None:
        """Return a reason to end, if another launch has taken the lock."""
        return self.lock.refresh() if self.lock else None

    def fails(self, step: int, reason: str) -> None:
        self.ends("failed", step, reason)

    def leave(self) -> None:
        """Release the lock and remove empty folders, so that a first run that was refused leaves nothing."""
        if self.lock:
            self.lock.release()
        for folder in (self.folder.ranks, self.folder.logs, self.folder.path, *self.made):
            remove_if_empty(folder)


def _begin(folder: RunFolder) -> _Launch:
    """Take the lock on rank 0 before anything is written. All ranks learn together whether they may continue."""
    lock = FolderLock(folder.lock) if dist.get_rank() == 0 else None
    taken = [lock.take(), uuid.uuid4().hex, list(map(str, lock.made))] if lock else None
    refusal, name, made = broadcast_json(taken)
    if refusal:
        raise UserError(refusal)
    if lock:
        for left in folder.all_host_records():  # by a launch before, perhaps on other hosts
            left.unlink()
    for part in (folder.ranks, folder.logs):
        part.mkdir(parents=True, exist_ok=True)
    return _Launch(folder, name, lock, tuple(map(Path, made)))


@contextmanager
def _hosts_and_board() -> Iterator[tuple[list[list[int]], Board]]:
    """Yield the ranks of each host, in order, and the board that those of this host share. If they do not all see it,
    because containers have a /dev/shm each, every one of them counts as a host of its own."""
    process = this_process()
    rank = dist.get_rank()
    places = gather_json([process.host, process.place])
    here = [other for other, place in enumerate(places) if place == places[rank]]
    with new_board(len(here)) as path:
        paths = gather_json(str(path))
        shared = _open_if_seen(Path(paths[here[0]]), here, rank)
        sees = gather_json(shared is not None)  # and all have opened what they can
        board = shared if shared and all(sees[other] for other in here) else open_board(path, 1, 0)
    blind = [place for place, sees_it in zip(places, sees, strict=True) if not sees_it]
    hosts: dict[str, list[int]] = {}
    for other, place in enumerate(places):
        hosts.setdefault(f"rank {other}" if place in blind else json.dumps(place), []).append(other)
    try:
        yield list(hosts.values()), board
    finally:
        board.close()


def _open_if_seen(path: Path, here: list[int], rank: int) -> Board | None:
    try:
        return open_board(path, len(here), here.index(rank))
    except OSError:
        return None


def _record_failure(launch: _Launch, heartbeat: Heartbeat, error: BaseException) -> None:
    message = f"{type(error).__name__}: {error}".split("\n")[0][:500]
    if isinstance(error, OnlyChecked):
        heartbeat.withdrawn()
        if not launch.folder.run_file.exists():
            launch.folder.log(dist.get_rank()).unlink(missing_ok=True)
    elif isinstance(error, UserError):
        if launch.folder.run_file.exists():
            heartbeat.failed(message)
        else:  # the run has written nothing yet, and leaves nothing
            heartbeat.withdrawn()
            launch.folder.log(dist.get_rank()).unlink(missing_ok=True)
    elif isinstance(error, Stopped):
        heartbeat.ended()
        launch.ends("stopped", heartbeat.step, str(error))
        with suppress(RuntimeError):
            dist.barrier()  # some launchers kill all ranks as soon as one leaves; rank 0 has written the status by then
    else:
        if _lost_a_peer(error):
            heartbeat.wait_for_cause(message)
        heartbeat.failed(message)
        launch.ends("diverged" if isinstance(error, Diverged) else "failed", heartbeat.step, message)


def _end_at_once(folder: Path, step: int) -> NoReturn:
    """End the process, not by an exception: the main thread may wait in a collective that nothing interrupts."""
    if dist.get_rank() == 0:
        log(f"interrupted at step {step}; {what_is_lost(folder, step)}")
    os._exit(EXIT_INTERRUPTED)


def _lost_a_peer(error: BaseException | None) -> bool:
    """True if a collective failed because another rank is gone: an effect, not the cause."""
    while error is not None:
        if isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS_OF_A_LOST_PEER):
            return True
        error = error.__cause__ or error.__context__
    return False
