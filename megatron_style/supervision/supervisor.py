"""Keep a run going: start it, and start it again from its last checkpoint when a rank or a host dies.

python -m megatron_style.supervision.supervisor --processes 2 run_configs/quickstart.yaml --set output.path=runs/first
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from megatron_style.base.command import (
    EXIT_BAD_INPUT,
    EXIT_DIVERGED,
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_STOPPED,
    command_parser,
    log,
    run_command,
)
from megatron_style.base.errors import UserError
from megatron_style.base.run_folder import RunFolder
from megatron_style.config.run import load_run, seconds_of
from megatron_style.config.train_arguments import add_run_arguments, settings_of
from megatron_style.hosts.hosts import Unanswered, read_hostfile
from megatron_style.supervision.cluster import Hosts, Ssh, answering, divisible, signal_ranks, ssh
from megatron_style.supervision.launch import Launch
from megatron_style.supervision.launch_spec import Order
from megatron_style.supervision.lock import FolderLock
from megatron_style.supervision.record import RankRecord, read_records
from megatron_style.supervision.signals import StopSignals

STOP_SECONDS = 120.0  # to save and leave, when the supervisor is asked to stop
LONGEST_PAUSE = 300.0
LOOK_SECONDS = 1.0


class Asked(Exception):
    """Someone wants the supervisor to end."""


class Failed(Exception):
    """One attempt came to nothing; another may not."""


class Supervisor:
    def __init__(self, order: Order, *, ssh: Ssh = ssh) -> None:
        self._order, self._ssh = order, ssh
        self._folder = order.run.output.path
        self._lock = FolderLock(RunFolder(self._folder).supervisor)
        self._leftovers: list[RankRecord] = []  # ranks of the last launch, which may live
        self._attempts: list[str] = []

    def run(self) -> int:
        """Return the exit code. Whatever happens, no rank remains."""
        refusal = self._lock.take()
        if refusal:
            raise UserError(refusal)
        self._signals = StopSignals()
        try:
            return self._until_done()
        except Asked:
            log("supervisor: asked to stop between two attempts")
            return EXIT_STOPPED
        finally:
            self._signals.close()
            self._lock.release()

    def _until_done(self) -> int:
        run_lock = FolderLock(RunFolder(self._folder).lock, sleep=self._sleep)
        refusal = run_lock.clear()
        if refusal:  # someone trains there without a supervisor: those are no leftovers
            raise UserError(refusal)
        self._leftovers = self._records()
        failures = 0
        while True:
            before = self._checkpoint()
            try:
                signal_ranks(self._leftovers, self._order.hosts, self._ssh)  # a host may answer only now
                self._refuse_to_share(run_lock)
                return self._attempt()
            except Failed as failure:
                self._attempts.append(str(failure))
            failures = 1 if self._checkpoint() != before else failures + 1
            log(f"supervisor: attempt {len(self._attempts)} failed: {self._attempts[-1]}")
            if failures > self._order.retries:
                self._summarise()
                return EXIT_FAILED
            seconds = min(self._order.pause * 2 ** (failures - 1), LONGEST_PAUSE)
            log(f"supervisor: again in {seconds:g} s from {self._checkpoint() or 'the beginning'}")
            self._sleep(seconds)

    def _attempt(self) -> int:
        """Return the run's own exit code, if trying again would not change it."""
        hosts = self._usable_hosts() if self._order.hosts else {}
        launch = self._launch(hosts)
        code = launch.code(self._signals)
        if code == EXIT_DONE:
            log(f"supervisor: finished at step {launch.step}, in attempt {len(self._attempts) + 1}")
        elif code == EXIT_DIVERGED:
            log(f"supervisor: {self._reason(launch)}; not tried again, because it would diverge again")
        elif code == EXIT_BAD_INPUT:
            log("supervisor: the run's input is wrong, so it is not tried again")
        elif code not in (EXIT_STOPPED, EXIT_INTERRUPTED) and not self._signals.asked:
            raise Failed(self._reason(launch))
        return code

    def _launch(self, hosts: Hosts) -> Launch:
        """Start the run on these hosts, wait until it has ended, and end what remains."""
        with tempfile.TemporaryDirectory() as directory:
            command = self._command(Path(directory), hosts)
            try:
                launch = Launch(
                    command, self._folder, hosts=list(self._order.hosts), over_ssh=list(hosts), ssh=self._ssh
                )
            except Unanswered as error:
                raise Failed(str(error)) from None
            with launch:
                try:
                    self._wait(launch)
                except Asked:
                    launch.stop(self._signals, seconds=STOP_SECONDS)
                finally:
                    self._leftovers = launch.records  # on a host that does not answer
        return launch

    def _command(self, directory: Path, hosts: Hosts) -> list[str]:
        return self._order.command(directory, hosts)

    def _usable_hosts(self) -> Hosts:
        tensor = self._order.run.parallel.tensor
        answer = answering(self._order.hosts, self._ssh)
        hosts = divisible(answer, tensor)
        silent = [host for host in self._order.hosts if host not in answer]
        if silent:
            log(f"supervisor: without {', '.join(silent)}, which do not answer: {sum(hosts.values())} ranks")
        if not hosts:
            room = sum(answer.values())
            raise Failed(f"the hosts that answer have room for {room} ranks; parallel.tensor needs {tensor}")
        return hosts

    def _wait(self, launch: Launch) -> None:
        last, since = self._position(), time.monotonic()
        while not launch.has_ended:
            self._sleep(LOOK_SECONDS)
            position = self._position()
            if position != last:
                last, since = position, time.monotonic()
            if time.monotonic() - since > self._order.stall and not launch.has_ended:
                raise Failed(f"no new step for {self._order.stall:g} s")

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
        """Return rank 0's word, or another rank's; when all were killed, there is none."""
        if launch.status:
            return f"step {launch.status.step}: {launch.status.error}"
        told = [record.error for record in launch.records if record.phase == "failed" and record.error]
        return (
            told[0] if told else f"the launcher ended with exit code {launch.launcher_code}, and no rank could say why"
        )

    def _refuse_to_share(self, run_lock: FolderLock) -> None:
        """A host that dropped out may still train there; it ends by itself, as its peers are gone."""
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
                raise Asked
            lost = self._lock.refresh()
            if lost:
                raise UserError(lost)
            left = until - time.monotonic()
            if left <= 0:
                return
            time.sleep(min(left, 1.0))


def _duration(text: str) -> float:
    try:
        return seconds_of(text)
    except (ValueError, KeyError):
        raise argparse.ArgumentTypeError(f"{text!r} is no duration; write 90s, 30m or 2h") from None


def main() -> None:
    parser = command_parser(
        "supervision.supervisor",
        "Train, and go on from the last checkpoint when a rank or a host dies.",
        "./launch/supervise.sh --hostfile hosts --retries 5 run_configs/quickstart.yaml --set output.path=runs/first",
    )
    parser.add_argument("--hostfile", type=Path, metavar="FILE", help="lines of `host slots=N`; default: this machine")
    parser.add_argument(
        "--processes", type=int, metavar="N", help="ranks on this machine; default: one per accelerator"
    )
    parser.add_argument("--retries", type=int, default=5, metavar="N", help="so many in a row without a new checkpoint")
    parser.add_argument("--pause", type=_duration, default=5.0, metavar="5s", help="before a retry; doubles each time")
    parser.add_argument("--stall", type=_duration, default=1800.0, metavar="30m", help="so long without a new step")
    add_run_arguments(parser)
    args = parser.parse_args()
    if args.hostfile and args.processes:
        raise UserError("--processes is for this machine only; a hostfile says how many with `slots=N`")
    settings = settings_of(args)
    order = Order(
        run=load_run(args.run, settings),
        arguments=(str(args.run), *(word for setting in settings for word in ("--set", setting))),
        hosts={host.name: host.slots or 1 for host in read_hostfile(args.hostfile)} if args.hostfile else {},
        processes=args.processes,
        retries=args.retries,
        pause=args.pause,
        stall=args.stall,
    )
    sys.exit(Supervisor(order).run())


if __name__ == "__main__":
    run_command(main)
