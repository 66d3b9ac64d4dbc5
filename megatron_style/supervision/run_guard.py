"""Around a whole run: the lock of its folder, the log and heartbeat of each rank, and the record of how it ended."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

from megatron_style.base.command import EXIT_INTERRUPTED, log
from megatron_style.base.errors import Diverged, Stopped, UserError
from megatron_style.base.run_folder import RunFolder
from megatron_style.base.terminal import Terminal
from megatron_style.parallel.collectives import broadcast_json, gather_json
from megatron_style.supervision.heartbeat import Heartbeat
from megatron_style.supervision.lock import FolderLock, remove_if_empty
from megatron_style.supervision.process import this_process
from megatron_style.supervision.rank_log import rank_log
from megatron_style.supervision.record import State, Status, now, what_is_lost, write_status
from megatron_style.supervision.signals import StopSignals

_SIGNS_OF_A_LOST_PEER = ("gloo", "NCCL", "Connection closed by peer", "Connection reset", "Broken pipe", "ProcessGroup")


@contextmanager
def guard_run(folder: Path, signals: StopSignals) -> Iterator[tuple[Heartbeat, Terminal | None]]:
    """When one rank stops, the others end within 30 seconds, and one of them says who it was. Yield the heartbeat of
    this rank and the terminal that shows its progress, if there is one."""
    launch = _begin(RunFolder(folder))
    try:
        with rank_log(folder, dist.get_rank(), launch.name) as terminal:
            heartbeat = Heartbeat(
                folder,
                rank=dist.get_rank(),
                launch=launch.name,
                watches=_ranks_to_watch(),
                every_beat=launch.refresh_lock,
                before_leaving=launch.fails,
            )
            signals.react = lambda: _end_at_once(folder, heartbeat.step) if signals.ends_at_once else None
            heartbeat.beat()  # from here on the rank may be asked to stop
            dist.barrier()  # every rank has its record: whoever is missing from now on is lost
            heartbeat.start()
            try:
                yield heartbeat, terminal
                dist.barrier()  # nobody stops watching while another rank still works
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

    def ends(self, state: State, step: int, error: str = "") -> None:
        """Rank 0's word on how it ended, which a supervisor trusts: a launcher's exit code may be 0 after a kill."""
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
        """A first run that was refused leaves nothing: the last rank to go finds the folders empty."""
        if self.lock:
            self.lock.release()
        for folder in (self.folder.ranks, self.folder.logs, self.folder.path):
            remove_if_empty(folder)


def _begin(folder: RunFolder) -> _Launch:
    """Rank 0 takes the lock before anything is written, and all ranks learn together whether they may go on."""
    lock = FolderLock(folder.lock) if dist.get_rank() == 0 else None
    refusal, name = broadcast_json([lock.take(), uuid.uuid4().hex] if lock else None)
    if refusal:
        raise UserError(refusal)
    for part in (folder.ranks, folder.logs):
        part.mkdir(parents=True, exist_ok=True)
    return _Launch(folder, name, lock)


def _ranks_to_watch() -> list[int]:
    """Rank 0 watches all. The others watch rank 0, which tells them, and their own host."""
    me = this_process()
    places = gather_json([me.host, me.place])
    here = places[dist.get_rank()]
    return [rank for rank, place in enumerate(places) if 0 in (rank, dist.get_rank()) or place == here]


def _record_failure(launch: _Launch, heartbeat: Heartbeat, error: BaseException) -> None:
    told = f"{type(error).__name__}: {error}".split("\n")[0][:500]
    if isinstance(error, UserError):
        if launch.folder.run_file.exists():
            heartbeat.failed(told)
        else:  # nothing of a run is there yet, and nothing is left
            heartbeat.withdrawn()
            launch.folder.log(dist.get_rank()).unlink(missing_ok=True)
    elif isinstance(error, Stopped):
        heartbeat.ended()
        launch.ends("stopped", heartbeat.step, str(error))
        with suppress(RuntimeError):
            dist.barrier()  # some launchers kill the others as soon as one leaves: rank 0 has written its word by then
    else:
        if _lost_a_peer(error):
            heartbeat.wait_for_cause(told)
        heartbeat.failed(told)
        launch.ends("diverged" if isinstance(error, Diverged) else "failed", heartbeat.step, told)


def _end_at_once(folder: Path, step: int) -> NoReturn:
    """Not by an exception: the main thread may wait in a collective that nothing interrupts."""
    if dist.get_rank() == 0:
        log(f"interrupted at step {step}; {what_is_lost(folder, step)}")
    os._exit(EXIT_INTERRUPTED)


def _lost_a_peer(error: BaseException | None) -> bool:
    """A collective fails because another rank is gone: an effect, not a cause."""
    while error is not None:
        if isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS_OF_A_LOST_PEER):
            return True
        error = error.__cause__ or error.__context__
    return False
