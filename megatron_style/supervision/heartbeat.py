"""Each rank sends a heartbeat every few seconds, and ends itself when another rank is lost.

Nothing else notices a rank that hangs or a host that is down: collectives wait for minutes or for ever. The ranks of a
host share a board in memory, on which all watch all. The first living rank of a host writes the board to the host's
file in the run's folder. Rank 0 reads the files of all hosts, and that first rank reads the file of rank 0's host: the
load on a shared disk grows with the hosts, and nothing there is ever listed. Only changes count, by this host's own
clock, so clocks that differ between hosts do no harm.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from megatron_style.base.command import EXIT_FAILED, log
from megatron_style.base.run_folder import RunFolder
from megatron_style.hosts.board import Board
from megatron_style.hosts.forwarded_environment import LAUNCH
from megatron_style.supervision.process import this_process
from megatron_style.supervision.record import (
    Follows,
    HostFile,
    LineParser,
    Phase,
    RankRecord,
    Seen,
    line_of,
    now,
    what_is_lost,
)

TIMEOUT_SECONDS = 15.0  # a rank without a heartbeat for longer is lost
BEATS = 7.5  # within the timeout
ASLEEP_BEATS = 3.0  # if two looks are further apart, this process was suspended
CAUSE_BEATS = 10.0  # to find out which rank failed first, after a connection was lost
APPEAR_SECONDS = 60.0  # network disks may show a new file late


@dataclass(frozen=True)
class LostRank:
    record: RankRecord
    how: str

    def __str__(self) -> str:
        record = self.record
        return f"rank {record.rank} on {record.host} (pid {record.pid}) {self.how}"


class Watch:
    """Decides which of the other ranks are lost. It does nothing else, so that tests can give it any clock."""

    def __init__(
        self, launch: str, clock: Callable[[], float] = time.monotonic, *, timeout: float = TIMEOUT_SECONDS
    ) -> None:
        self._launch = launch
        self._timeout = timeout
        self._clock = clock
        self._last_look = clock()
        self._changed: dict[int, float] = {}
        self._seen: dict[int, Seen] = {}

    def look(self, found: Mapping[int, Seen]) -> list[LostRank]:
        """Return the ranks that are lost, given the records that were just read."""
        at = self._clock()
        if at - self._last_look > ASLEEP_BEATS * self._timeout / BEATS:  # the other ranks may have been suspended, too
            self._changed = dict.fromkeys(self._changed, at)
        self._last_look = at
        current = {rank: seen for rank, seen in found.items() if seen.record.launch == self._launch}
        for rank, seen in current.items():
            if rank not in self._seen or self._seen[rank].mark != seen.mark:
                self._seen[rank] = seen
                self._changed[rank] = at
        losses = []
        for rank, seen in self._seen.items():
            how = self._what_became_of(seen, silent=at - self._changed[rank], removed=rank not in current)
            if how:
                losses.append(LostRank(seen.latest, how))
        return losses

    @property
    def known(self) -> set[int]:
        return set(self._seen)

    def _what_became_of(self, seen: Seen, *, silent: float, removed: bool) -> str | None:
        record = seen.record
        if record.phase == "ended" or record.follows == "waiting":
            return None
        if record.phase == "failed":
            return f"failed at {_place_of(seen)}: {record.error}"
        if removed:
            return f"removed its record at {_place_of(seen)}: its input is wrong, or someone removed the folder"
        if record.is_gone:
            return f"was killed; last heard of at {_place_of(seen)}"
        if silent > self._timeout:
            return (
                f"sent no heartbeat for {silent:.0f} s; the process or its host is presumed dead; "
                f"last heard of at {_place_of(seen)}"
            )
        return None


def _place_of(seen: Seen) -> str:
    record = seen.latest
    return f"step {record.step}, {record.during or record.phase}"


class Heartbeat:
    """The thread with which a rank shows that it is alive and watches others."""

    def __init__(
        self,
        folder: Path,
        *,
        rank: int,
        launch: str,
        hosts: Sequence[Sequence[int]],
        board: Board,
        timeout: float = TIMEOUT_SECONDS,
        clock: Callable[[], float] = time.monotonic,
        every_beat: Callable[[], str | None] = lambda: None,
        before_leaving: Callable[[int, str], None] = lambda _step, _reason: None,
    ) -> None:
        """Take the ranks of each host, in order, and the board of this one, with a slot for each of its ranks.
        `every_beat` may return a reason to end, `before_leaving` gets the step and the reason."""
        self._folder = folder
        self._rank = rank
        self._launch = launch
        self._hosts = hosts
        self._here = next(ranks for ranks in hosts if rank in ranks)
        self._board = board
        self._parser = LineParser()
        self._on_board: dict[int, Seen] = {}
        self._files: dict[int, HostFile] = {}  # by the first rank of a host
        self._is_first = rank == self._here[0]  # of the living ranks of this host
        self._watch = Watch(launch, clock, timeout=timeout)
        self._interval = timeout / BEATS
        self._process = this_process()
        self._phase: Phase = "preflight"
        self._follows: Follows = ""
        self.step = 0
        self._during = ""
        self._error = ""
        self._beats = 0
        self._began = time.monotonic()
        self._checked_for_missing = False
        self._done = threading.Event()
        self._writing = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._every_beat = every_beat
        self._before_leaving = before_leaving

    def at(self, step: int, phase: Phase) -> None:
        """Note where the loop is. This costs nothing: the thread writes it with its next beat."""
        self.step = step
        self._phase = phase

    def beat(self) -> None:
        """Write to the board and, as the host's first living rank or with the last word of this one, to its file."""
        with self._writing:
            self._beats += 1
            record = RankRecord(
                **vars(self._process), rank=self._rank, launch=self._launch, step=self.step, phase=self._phase,
                time=now(), beats=self._beats, during=self._during, error=self._error, follows=self._follows,
                key=os.environ.get(LAUNCH, ""),
            )  # fmt: skip
            self._board.write(line_of(record))
            self._is_first = self._is_first or self._all_before_are_gone()
            if self._is_first or self._phase in ("ended", "failed"):
                self._publish()

    def publish(self) -> None:
        """Write the host's file, when all of its ranks are on the board."""
        with self._writing:
            if self._is_first:
                self._publish()

    def look(self) -> list[LostRank]:
        """Return the ranks that are lost: of this host, and of those whose files this rank reads."""
        found = self._read_board()
        if self._rank == 0:
            for ranks in self._hosts[1:]:
                found |= self._file_of(ranks).read()
        elif self._is_first and 0 not in self._here:
            found |= self._file_of(self._hosts[0]).read()
        return self._watch.look({rank: seen for rank, seen in found.items() if rank != self._rank})

    def _all_before_are_gone(self) -> bool:
        board = self._read_board()
        return all(board[rank].record.is_gone for rank in self._here if rank < self._rank and rank in board)

    def _file_of(self, ranks: Sequence[int]) -> HostFile:
        if ranks[0] not in self._files:
            self._files[ranks[0]] = HostFile(RunFolder(self._folder).host_records(ranks[0]))
        return self._files[ranks[0]]

    def _read_board(self) -> dict[int, Seen]:
        """Return the records of this host. In place of one that is just being written, return the one before."""
        lines = self._board.read()
        written = [rank for rank, line in zip(self._here, lines, strict=True) if line]
        seen = self._on_board | self._parser.seen(filter(None, lines))
        self._on_board = {rank: seen[rank] for rank in written if rank in seen}
        return dict(self._on_board)

    def _publish(self) -> None:
        lines = [seen.mark[1] for seen in self._read_board().values()]
        file = self._file_of(self._here)
        if lines:
            file.write(lines)
        else:
            file.remove()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._done.set()
        if self._thread.is_alive():
            self._thread.join()

    def ended(self) -> None:
        self.stop()
        self._phase = "ended"
        self.beat()

    def failed(self, error: str) -> None:
        self.stop()
        self._fail(error, follows="")

    def withdrawn(self) -> None:
        """Stop and leave no record: this rank's input is wrong, and it reports that itself."""
        self.stop()
        with self._writing:
            self._board.write(b"")
            self._publish()

    def wait_for_cause(self, error: str) -> None:
        """Wait after a lost connection: another rank failed first. The thread reports which, and ends this process."""
        self._fail(error, follows="waiting")
        self._thread.join(CAUSE_BEATS * self._interval)

    def _fail(self, error: str, *, follows: Follows) -> None:
        self._during = self._during or self._phase
        self._phase = "failed"
        self._error = error
        self._follows = follows
        self.beat()

    def _run(self) -> None:
        suspected = False
        while not self._done.wait(self._interval):
            try:
                self.beat()
                reason = self._every_beat()
                losses = self.look()
            except OSError:  # a disk that is full or unreachable for a moment is no reason to end
                continue
            if reason:
                self._leave(reason, logs=True)
            if losses and suspected:  # seen twice: a rank that failed at the same moment has reported it by now
                self._leave(_describe(losses, self._folder), logs=self._reports(losses))
            suspected = bool(losses)
            self._warn_of_missing_ranks()

    def _leave(self, reason: str, *, logs: bool) -> NoReturn:
        """End the process, not by an exception: the main thread waits in a collective that nothing interrupts."""
        try:
            self._fail(reason, follows="left")
            if logs:
                log(f"error: {reason}")
            self._before_leaving(self.step, reason)
        finally:
            os._exit(EXIT_FAILED)

    def _reports(self, losses: list[LostRank]) -> bool:
        """True if this rank logs the cause, so that it is logged once: the first rank that can, on the host of the lost
        one or, if none is left there, of all."""
        lost = {loss.record.rank for loss in losses if not loss.record.follows}
        if not lost:
            return False  # those that know the cause have logged it
        nearest = next(ranks for ranks in self._hosts if min(lost) in ranks)
        for ranks in (nearest, *self._hosts):
            able = self._able_to_report(ranks, lost)
            if able:
                return self._rank == min(able)
        return True

    def _able_to_report(self, ranks: Sequence[int], lost: set[int]) -> set[int]:
        """Return the ranks of a host that are alive, or have left after they have reported what they knew: these may
        look lost to a rank that read their records just before."""
        seen = self._read_board() if ranks == self._here else self._file_of(ranks).read()
        records = [found.record for found in seen.values() if found.record.launch == self._launch]
        living = {record.rank for record in records if record.phase != "ended" and not record.is_gone}
        return living - lost | {record.rank for record in records if record.follows}

    def _warn_of_missing_ranks(self) -> None:
        """Warn once, on rank 0, of ranks whose records have never appeared."""
        if self._checked_for_missing or self._rank or time.monotonic() - self._began < APPEAR_SECONDS:
            return
        self._checked_for_missing = True
        others = {rank for ranks in self._hosts for rank in ranks if rank != self._rank}
        missing = sorted(others - self._watch.known)
        if missing:
            records = RunFolder(self._folder).ranks
            log(
                f"warning: {records} has no record of {len(missing)} ranks (first: rank {missing[0]}): "
                f"output.path is not shared between the hosts, so each host watches its own ranks only"
            )


def _describe(losses: list[LostRank], folder: Path) -> str:
    losses = [loss for loss in losses if not loss.record.follows] or losses
    causes = "; ".join(map(str, losses[:3])) + (f"; and {len(losses) - 3} more" if len(losses) > 3 else "")
    log_file = RunFolder(folder).log(losses[0].record.rank)
    lost = what_is_lost(folder, max(loss.record.step for loss in losses))
    return f"{causes}. The other ranks end; {lost}; start the run again to resume. See {log_file}"
