"""Find the hosts of a supervised run that answer, and end what an earlier launch left running on them."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from megatron_style.hosts.forwarded_environment import LAUNCH
from megatron_style.hosts.hosts import Host, Unanswered
from megatron_style.supervision.record import RankRecord

Ssh = Callable[[str, str], bool]
Hosts = dict[str, int]  # slots by host name, in the order of the hostfile
_SSH_SECONDS = 30  # a host whose disk hangs accepts the connection and never answers
_GONE_SECONDS = 10.0


def ssh(host: str, command: str) -> bool:
    """Run a command on a host and return True if it succeeded."""
    try:
        Host(host).run(command, _SSH_SECONDS)
    except Unanswered:
        return False
    return True


def answering(hosts: Mapping[str, int], ssh: Ssh) -> Hosts:
    with ThreadPoolExecutor(32) as threads:
        answers = list(threads.map(lambda host: ssh(host, "true"), hosts))
    return {host: hosts[host] for host, answered in zip(hosts, answers, strict=True) if answered}


def divisible(hosts: Mapping[str, int], tensor: int) -> Hosts:
    """Leave the last slots free, so that the tensor-parallel degree divides the number of ranks."""
    spare = sum(hosts.values()) % tensor
    kept: Hosts = {}
    for host, slots in reversed(list(hosts.items())):
        free = min(spare, slots)
        spare -= free
        if slots > free:
            kept[host] = slots - free
    return dict(reversed(list(kept.items())))


def signal_ranks(
    records: Iterable[RankRecord], hosts: Iterable[str], ssh: Ssh, number: signal.Signals = signal.SIGKILL
) -> None:
    """Send a signal to the ranks that are still alive, here and on other hosts; never to a reused pid."""
    records = list(records)
    for record in records:
        record.send(number)
    elsewhere = [record for record in records if not record.is_local]
    if elsewhere:
        command = "\n".join(_signal_command(record, number) for record in elsewhere) + "\ntrue"
        with ThreadPoolExecutor(32) as threads:
            list(threads.map(lambda host: ssh(host, command), hosts))
    until = time.monotonic() + _GONE_SECONDS
    while number == signal.SIGKILL and time.monotonic() < until and any(r.is_local and not r.is_gone for r in records):
        time.sleep(0.1)


def kill_launch(key: str, hosts: Iterable[str], ssh: Ssh) -> None:
    """Kill every process of a launch, here and on these hosts, even those without a record: all of them have its key in
    their environment."""
    until = time.monotonic() + _GONE_SECONDS
    while (pids := _processes_of(key)) and time.monotonic() < until:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)
    elsewhere = [host for host in hosts if host not in ("localhost", "127.0.0.1", socket.gethostname())]
    command = f"for p in /proc/[0-9]*; do grep -qs {LAUNCH}={key} $p/environ && kill -9 ${{p#/proc/}}; done; true"
    with ThreadPoolExecutor(32) as threads:
        list(threads.map(lambda host: ssh(host, f"sh -c {shlex.quote(command)}"), elsewhere))


def _processes_of(key: str) -> list[int]:
    """Return the pids of a launch on this host, except this process's own."""
    entry = f"{LAUNCH}={key}".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # it has ended, or belongs to another user
            if entry in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return [pid for pid in found if pid != os.getpid()]


def _signal_command(record: RankRecord, number: signal.Signals) -> str:
    """Return a command for any shell. A hostfile may list addresses, so each host compares its own hostname."""
    started = f"\"$(sed 's/.*) //' /proc/{record.pid:d}/stat 2>/dev/null | cut -d ' ' -f 20)\""
    here = f'[ "$(hostname)" = {shlex.quote(record.host)} ]'
    return f'{here} && [ {started} = "{record.started:d}" ] && kill -{number:d} {record.pid:d}'
