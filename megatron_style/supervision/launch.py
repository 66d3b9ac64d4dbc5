"""Run a launcher so that every signal reaches the run, and leave with the run's own exit code.

python -m megatron_style.supervision.launch deepspeed --num_accelerators 2 --module megatron_style.train RUN.yaml

On Ctrl-C and SIGTERM a launcher kills its ranks, DeepSpeed's on several hosts by a broad `pkill`. So it gets a session
of its own, which a terminal's signals do not reach, and the ranks are asked directly: they save, and leave together.
"""

from __future__ import annotations

if __name__ == "__main__":
    from megatron_style import start

    start("supervision.launch")  # imports this file

import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from megatron_style.base.command import (
    EXIT_DIVERGED,
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_STOPPED,
    LAST_WORDS,
    log,
)
from megatron_style.base.errors import UserError
from megatron_style.config.run_file import load_run
from megatron_style.config.train_arguments import parse_train_arguments
from megatron_style.hosts.carrier import launch_environment
from megatron_style.hosts.hosts import Host, read_hostfile
from megatron_style.supervision.cluster import Ssh, kill_launch, signal_ranks, ssh
from megatron_style.supervision.finished import what_is_finished
from megatron_style.supervision.record import RankRecord, State, Status, read_records, read_status, what_is_lost
from megatron_style.supervision.signals import StopSignals

_PROGRAM = "megatron_style.train"
_LOOK_SECONDS = 0.2
_CODES: dict[State, int] = {"finished": EXIT_DONE, "stopped": EXIT_STOPPED, "diverged": EXIT_DIVERGED}


class Launch:
    """One start of a launcher and all its processes, on this host and others; after the `with` none of them is left."""

    def __init__(
        self,
        command: Sequence[str],
        folder: Path,
        *,
        hosts: Sequence[str] = (),
        over_ssh: Sequence[str] = (),
        ssh: Ssh = ssh,
    ) -> None:
        """Start the launcher. `hosts` may run its processes; those in `over_ssh` need its variables forwarded."""
        self._folder = folder
        self._hosts = hosts
        self._ssh = ssh
        self._stopped_early = False
        self.last_words: str | None = None  # the error of a process of this host, after the `with`
        self._last_code: int | None = None  # the exit code of that process
        self._key = uuid.uuid4().hex  # in the environment of each of its processes, and in the records of its ranks
        with ExitStack() as stack:
            self._words = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            environment = stack.enter_context(launch_environment([Host(name) for name in over_ssh], self._key))
            environment[LAST_WORDS] = str(self._words)
            self._process = subprocess.Popen(command, env=environment, start_new_session=True)
            self._environment = stack.pop_all()

    def __enter__(self) -> Launch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Kill what is left. The launcher is not asked to end: DeepSpeed's runs a broad `pkill` on every host then."""
        own_end = self.has_ended and self.status is not None and self.status.state in _CODES
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        kill_launch(self._key, () if own_end else self._hosts, self._ssh)
        signal_ranks(self.records, (), self._ssh)  # waits for those of this host: a killed process takes a while to end
        for path in sorted(self._words.iterdir(), reverse=True):  # wrong input comes before its effects on other ranks
            self.last_words = path.read_text(encoding="utf-8")
            self._last_code = int(path.name)
            break
        self._environment.close()

    @property
    def has_ended(self) -> bool:
        """True if the launcher has ended. It is not reaped, so that the id of its process group cannot be reused."""
        return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    @property
    def launcher_code(self) -> int:
        """Return the launcher's own exit code, after the `with`."""
        return self._process.returncode

    @property
    def records(self) -> list[RankRecord]:
        """Return the records of the ranks of this launch."""
        return [seen.record for seen in read_records(self._folder).values() if seen.record.key == self._key]

    @property
    def status(self) -> Status | None:
        """Return what rank 0 recorded at the end of this launch."""
        status = read_status(self._folder)
        names = {record.launch for record in self.records}
        return status if status and status.launch in names else None

    @property
    def step(self) -> int:
        """Return how many steps are done, by the last records of the ranks."""
        return max((record.step for record in self.records), default=0)

    def stop(self, signals: StopSignals, *, seconds: float = float("inf")) -> None:
        """Let the run save and leave, until a timeout or a second Ctrl-C. A run that has not begun has nothing to save,
        and is not waited for."""
        until = time.monotonic() + seconds
        ranks = self.records
        self._stopped_early = not ranks
        if ranks:
            log("asked to stop: the run finishes its step, saves and leaves; a second Ctrl-C ends it at once")
            self._ask(ranks)
        while ranks and not self.has_ended and not signals.ends_at_once and time.monotonic() < until:
            time.sleep(_LOOK_SECONDS)

    def code(self, signals: StopSignals) -> int:
        """Return the run's own exit code, which may differ from the launcher's, and log what an early end has lost."""
        if self.status and self.status.state in _CODES:
            return _CODES[self.status.state]
        if signals.ends_at_once or self._stopped_early:
            log(f"interrupted at step {self.step}; {what_is_lost(self._folder, self.step)}")
            return EXIT_INTERRUPTED if signals.ends_at_once else EXIT_STOPPED
        if self._process.returncode == EXIT_DONE and self._all_ended:
            return EXIT_DONE
        if self._process.returncode == EXIT_DONE or signals.asked:
            log(f"error: the run ended at step {self.step} without a message; {what_is_lost(self._folder, self.step)}")
        if self._last_code is not None:
            return self._last_code
        return self._process.returncode if 0 < self._process.returncode < 128 else EXIT_FAILED

    @property
    def _all_ended(self) -> bool:
        """True if each rank has recorded its end: after a kill on another host, the launcher's exit code may be 0."""
        return bool(self.records) and all(record.phase == "ended" for record in self.records)

    def _ask(self, ranks: Sequence[RankRecord]) -> None:
        """Ask the ranks that a pid or ssh reaches; all stop together. If there are none, ask the launcher (srun)."""
        if not self._hosts and not any(rank.is_local for rank in ranks):
            os.kill(self._process.pid, signal.SIGTERM)
        signal_ranks(ranks, self._hosts, self._ssh, signal.SIGTERM)


def main() -> None:
    signals = StopSignals()
    words = sys.argv[1:]
    if _PROGRAM not in words:
        raise UserError(f"{' '.join(words) or 'no command'}: starts no {_PROGRAM}; give a launcher that does")
    arguments = parse_train_arguments(words[words.index(_PROGRAM) + 1 :])  # those of the run follow the launcher's
    run = load_run(arguments.run_file, arguments.settings)
    if arguments.trains_on and (done := what_is_finished(run)):
        log(done)
        return
    hosts = _hosts(words)
    with Launch(words, run.output.path, hosts=hosts, over_ssh=_over_ssh(words, hosts)) as launch:
        while not launch.has_ended and not signals.asked:
            time.sleep(_LOOK_SECONDS)
        if signals.asked:
            launch.stop(signals)
    is_check = arguments.only_checks and not signals.asked  # which leaves no record
    code = launch.launcher_code if is_check else launch.code(signals)
    if code and launch.last_words:
        log(launch.last_words)  # again: most launchers write lines of their own after it
    sys.exit(code)


def _hosts(words: Sequence[str]) -> list[str]:
    """Return the hosts that ssh reaches: those of a hostfile, unless Slurm starts the ranks there."""
    if "--hostfile" not in words or "slurm" in words:
        return []
    return [host.name for host in read_hostfile(Path(words[words.index("--hostfile") + 1]))]


def _over_ssh(words: Sequence[str], hosts: Sequence[str]) -> Sequence[str]:
    """Return the hosts that the deepspeed launcher reaches by ssh: it starts the ranks of a single host itself."""
    return hosts if Path(words[0]).name == "deepspeed" and len(hosts) > 1 else ()
