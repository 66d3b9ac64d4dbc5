"""Keep a run going: start it, and restart it from its last checkpoint when a rank or a host dies."""

from __future__ import annotations

import socket
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from megatron_style.base.command import (
    EXIT_BAD_INPUT,
    EXIT_DIVERGED,
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_STOPPED,
    log,
)
from megatron_style.base.errors import UserError
from megatron_style.base.run_folder import RunFolder
from megatron_style.config.run import RunConfig
from megatron_style.hosts.hosts import Unanswered
from megatron_style.supervision.cluster import Hosts, Ssh, answering, divisible, signal_ranks, ssh
from megatron_style.supervision.launch import Launch
from megatron_style.supervision.lock import FolderLock
from megatron_style.supervision.record import RankRecord, read_records
from megatron_style.supervision.signals import StopSignals

_LAUNCHER = (sys.executable, "-m", "deepspeed.launcher.runner", "--log_level", "warning")
STOP_SECONDS = 120.0  # to save and leave, when the supervisor is asked to stop
LONGEST_PAUSE = 300.0
LOOK_SECONDS = 1.0
POSITION_SECONDS = 10.0  # between two looks at the records of all hosts


@dataclass(frozen=True)
class LaunchSpec:
    """The run that a supervisor keeps going, and the command that launches it on the hosts that answer."""

    run: RunConfig
    arguments: tuple[str, ...]  # of train
    hosts: Hosts = field(default_factory=dict)  # none: this machine
    processes: int | None = None
    retries: int = 5
    pause: float = 5.0
    stall: float = 1800.0

    def command(self, directory: Path, hosts: Hosts) -> list[str]:
        """Return the launch command. Hosts are always reached by ssh: DeepSpeed would start a single one here."""
        where = ["--hostfile", str(directory / "none")]
        if hosts:
            (directory / "hostfile").write_text("".join(f"{name} slots={n}\n" for name, n in hosts.items()))
            where = ["--hostfile", str(directory / "hostfile"), "--force_multi"]
        elif self.processes:
            where += ["--num_accelerators", str(self.processes)]
        where += ["--master_port", str(_free_port())]
        return [*_LAUNCHER, *where, "--module", "megatron_style.train", *self.arguments]


class StopAsked(Exception):
    """A signal asks the supervisor to stop."""


class Failed(Exception):
    """One attempt failed; another may succeed."""


class Supervisor:
    """Launches a run until it has finished, or has failed too often without a new checkpoint."""

    def __init__(self, spec: LaunchSpec, *, ssh: Ssh = ssh) -> None:
        self._spec = spec
        self._ssh = ssh
        self._folder = spec.run.output.path
        self._lock = FolderLock(RunFolder(self._folder).supervisor)
        self._leftovers: list[RankRecord] = []  # ranks of the last launch, which may be alive
        self._attempts: list[str] = []

    def run(self) -> int:
        """Supervise until the end, however it comes, so that no rank remains. Return the exit code."""
        refusal = self._lock.take()
        if refusal:
            raise UserError(refusal)
        self._signals = StopSignals()
        try:
            return self._until_done()
        except StopAsked:
            log("supervisor: asked to stop between two attempts")
            return EXIT_STOPPED
        finally:
            self._signals.close()
            self._lock.release()

    def _until_done(self) -> int:
        run_lock = FolderLock(RunFolder(self._folder).lock, sleep=self._sleep)
        refusal = run_lock.clear()
        if refusal:  # a run without a supervisor is active: its ranks are not leftovers
            raise UserError(refusal)
        self._leftovers = self._records()
        failures = 0
        while True:
            before = self._checkpoint()
            try:
                signal_ranks(self._leftovers, self._spec.hosts, self._ssh)  # a host may answer only now
                self._refuse_to_share(run_lock)
                return self._attempt()
            except Failed as failure:
                self._attempts.append(str(failure))
            failures = 1 if self._checkpoint() != before else failures + 1
            log(f"supervisor: attempt {len(self._attempts)} failed: {self._attempts[-1]}")
            if failures > self._spec.retries:
                self._summarise()
                return EXIT_FAILED
            seconds = min(self._spec.pause * 2 ** (failures - 1), LONGEST_PAUSE)
            log(f"supervisor: retrying in {seconds:g} s from {self._checkpoint() or 'the beginning'}")
            self._sleep(seconds)

    def _attempt(self) -> int:
        """Return the run's own exit code. Raise Failed if a retry may change it."""
        hosts = self._usable_hosts() if self._spec.hosts else {}
        launch = self._launch(hosts)
        code = launch.code(self._signals)
        if code == EXIT_DONE:
            log(f"supervisor: finished at step {launch.step}, in attempt {len(self._attempts) + 1}")
        elif code == EXIT_DIVERGED:
            log(f"supervisor: {self._reason(launch)}; no retry, because it would diverge again")
        elif code == EXIT_BAD_INPUT:
            log(f"supervisor: the run's input is wrong; no retry\n{launch.last_words or ''}".rstrip())
        elif code not in (EXIT_STOPPED, EXIT_INTERRUPTED) and not self._signals.asked:
            raise Failed(self._reason(launch))
        return code

    def _launch(self, hosts: Hosts) -> Launch:
        """Start the run on these hosts, wait until it has ended, and end what remains."""
        with tempfile.TemporaryDirectory() as directory:
            command = self._command(Path(directory), hosts)
            try:
                launch = Launch(
                    command, self._folder, hosts=list(self._spec.hosts), over_ssh=list(hosts), ssh=self._ssh
                )
            except Unanswered as error:
                raise Failed(str(error)) from None
            with launch:
                try:
                    self._wait(launch)
                except StopAsked:
                    launch.stop(self._signals, seconds=STOP_SECONDS)
                finally:
                    self._leftovers = launch.records  # on a host that does not answer
        return launch

    def _command(self, directory: Path, hosts: Hosts) -> list[str]:
        return self._spec.command(directory, hosts)

    def _usable_hosts(self) -> Hosts:
        tensor = self._spec.run.parallel.tensor
        answer = answering(self._spec.hosts, self._ssh)
        hosts = divisible(answer, tensor)
        silent = [host for host in self._spec.hosts if host not in answer]
        if silent:
            log(f"supervisor: without {', '.join(silent)}, which do not answer: {sum(hosts.values())} ranks")
        if not hosts:
            room = sum(answer.values())
            raise Failed(f"the hosts that answer have room for {room} ranks; parallel.tensor needs {tensor}")
        return hosts

    def _wait(self, launch: Launch) -> None:
        last = self._position()
        since = time.monotonic()
        looked = since
        while not launch.has_ended:
            self._sleep(LOOK_SECONDS)
            if time.monotonic() - looked > min(POSITION_SECONDS, self._spec.stall / 4):
                looked = time.monotonic()
                position = self._position()
                if position != last:
                    last = position
                    since = looked
            if time.monotonic() - since > self._spec.stall and not launch.has_ended:
                raise Failed(f"no new step for {self._spec.stall:g} s")

    def _position(self) -> list[tuple[str, int, str]]:
        return [(record.launch, record.step, record.phase) for record in self._records()]

    def _records(self) -> list[RankRecord]:
        return [seen.record for seen in read_records(self._folder).values()]

    def _checkpoint(self) -> str:
        try:
            return RunFolder(self._folder).latest.read_text(encoding="utf-8")
        except OSError:
            return ""

    def _reason(self, launch: Launch) -> str:
        """Return the error that rank 0 or another rank recorded; ranks that were killed recorded none."""
        if launch.status:
            return f"step {launch.status.step}: {launch.status.error}"
        errors = [record.error for record in launch.records if record.phase == "failed" and record.error]
        return errors[0] if errors else f"the launcher ended with exit code {launch.launcher_code}; no rank said why"

    def _refuse_to_share(self, run_lock: FolderLock) -> None:
        """Fail if a host that dropped out still trains there. It ends by itself, because its peers are gone."""
        refusal = run_lock.clear()
        if refusal:
            raise Failed(refusal)

    def _summarise(self) -> None:
        log(f"supervisor: given up after {len(self._attempts)} attempts, at {self._checkpoint() or 'the beginning'}:")
        for number, reason in enumerate(self._attempts, 1):
            log(f"  {number}. {reason}")

    def _sleep(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while True:
            if self._signals.asked:
                raise StopAsked
            lost = self._lock.refresh()
            if lost:
                raise UserError(lost)
            left = until - time.monotonic()
            if left <= 0:
                return
            time.sleep(min(left, 1.0))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
    return port
