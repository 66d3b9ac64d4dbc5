"""Check hosts before a launch: whether they answer, agree with each other, and have room for a run."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_style.base.command import Finding, Level
from megatron_style.base.cpu import describe_bf16
from megatron_style.base.units import size
from megatron_style.hosts.hosts import Host, Unanswered, ask_all
from megatron_style.hosts.launcher import DEFAULT_PORT

Facts = Mapping[Host, Mapping[str, Any]]
_GIB = 2**30
_MOST_SKEW = 2.0  # seconds; with more, the times of logs and files mislead
_PORT_SECONDS = 10.0


@dataclass(frozen=True)
class Demands:
    """The demands of a run on each of its hosts; the defaults are those of an unknown run."""

    folder: Path = Path()  # where it writes
    files: tuple[Path, ...] = ()  # that it reads
    checkpoint_bytes: int | None = None  # None: unknown
    checkpoints: int = 1  # on disk at the same time


@dataclass(frozen=True)
class Diagnosis:
    findings: tuple[Finding, ...]
    processes: int | None  # that a launch would start; None: unknown, because a host does not answer


def diagnose(hosts: Sequence[Host], demands: Demands) -> Diagnosis:
    """Ask all hosts, first what every launch needs, then what this run needs. A host that fails is not asked again."""
    offsets, unreachable = ask_all(hosts, Host.clock_offset)
    files = [str(path) for path in demands.files]
    facts, silent = ask_all(list(offsets), lambda host: host.ask("facts", folder=str(demands.folder), files=files))
    findings = [
        *judge_silence(unreachable, "not reachable by ssh without a password"),
        *judge_clocks(offsets),
        *judge_pdsh(hosts),
        *judge_silence(silent, "this project does not start there"),
        *judge_versions(facts),
        *judge_facts(facts, demands),
    ]
    able = list(facts)
    if len(able) > 1:
        findings += judge_folder(able, demands.folder)
    if able:
        findings += judge_network(able, str(facts[able[0]]["address"]))
    return Diagnosis(tuple(findings), _processes(hosts, facts))


def _processes(hosts: Sequence[Host], facts: Facts) -> int | None:
    if any(host.slots is None and host not in facts for host in hosts):
        return None
    return sum(host.slots or slots_of(host, facts[host]) for host in hosts)


def judge_silence(errors: Mapping[Host, Unanswered], what: str) -> Iterator[Finding]:
    for host, error in errors.items():
        yield Finding("FAIL", host.name, f"{what}: {error}")


def judge_pdsh(hosts: Sequence[Host]) -> Iterator[Finding]:
    if any(host.over_ssh for host in hosts) and shutil.which("pdsh") is None:
        yield Finding("FAIL", "pdsh", "not installed here: `deepspeed --hostfile` needs it; launch/mpi.sh does not")


def judge_facts(facts: Facts, demands: Demands) -> Iterator[Finding]:
    for host, answer in facts.items():
        yield from judge_host(host, answer)
        yield judge_disk(host, answer["disk"], demands.checkpoint_bytes, kept=demands.checkpoints)


def judge_clocks(offsets: Mapping[Host, float]) -> Iterator[Finding]:
    apart = max(offsets.values(), default=0) - min(offsets.values(), default=0)
    if apart > _MOST_SKEW:
        ahead, behind = (pick(offsets, key=lambda host: offsets[host]).name for pick in (max, min))
        yield Finding("WARN", "clocks", f"{ahead} is {apart:.1f} s ahead of {behind}; synchronize them with NTP")
    elif len(offsets) > 1:
        yield Finding("ok", "clocks", f"within {apart:.1f} s")


def judge_versions(facts: Facts) -> Iterator[Finding]:
    """Compare with the first host, whose first rank writes the records of the run."""
    if not facts:
        return
    first, *others = facts
    expected = facts[first]["same"]
    differing = 0
    for host in others:
        for name, value in facts[host]["same"].items():
            if value != expected[name]:
                differing += 1
                yield Finding("FAIL", host.name, f"{name} is {value}, on {first.name} it is {expected[name]}")
    if not differing:
        yield Finding("ok", "versions", ", ".join(f"{name} {value}" for name, value in expected.items()))


def judge_host(host: Host, facts: Mapping[str, Any]) -> Iterator[Finding]:
    kind = facts["devices"]["kind"]
    count = facts["devices"]["count"]
    slots = slots_of(host, facts)
    if slots > count:
        level: Level = "WARN" if kind == "core" else "FAIL"  # cores can be shared, but slowly
        yield Finding(level, host.name, f"{slots} slots, but {count} {kind}(s)")
    elif slots < count and kind != "core":
        yield Finding("WARN", host.name, f"{slots} slots leave {count - slots} of {count} {kind}(s) idle")
    else:
        yield Finding("ok", host.name, f"{slots} slot(s) on {count} {kind}(s)")
    if kind == "core":
        yield Finding("ok", host.name, describe_bf16(facts["bf16"]))
    level = "WARN" if facts["memory"] < slots * _GIB else "ok"
    yield Finding(level, host.name, f"{size(facts['memory'])} of memory free for {slots} process(es)")
    if facts["missing"]:
        yield Finding("FAIL", host.name, f"cannot read {', '.join(facts['missing'])}; prepare it, or share its folder")


def slots_of(host: Host, facts: Mapping[str, Any]) -> int:
    """Return the number of processes a launch starts there: without a hostfile one per accelerator, or one on CPUs."""
    devices = facts["devices"]
    return int(host.slots or (1 if devices["kind"] == "core" else devices["count"]))


def judge_disk(host: Host, free: int, checkpoint: int | None, *, kept: int) -> Finding:
    """Compare the free space with `kept` checkpoints, including the next one: the oldest is removed after it."""
    space = f"{size(free)} of disk space free"
    if checkpoint is None:
        return Finding("WARN" if free < _GIB else "ok", host.name, space)
    if free < checkpoint:
        return Finding("FAIL", host.name, f"{space}; one checkpoint takes about {size(checkpoint)}")
    level: Level = "WARN" if free < kept * checkpoint else "ok"
    return Finding(level, host.name, f"{space}; {kept} checkpoints take about {size(kept * checkpoint)}")


def judge_folder(hosts: Sequence[Host], folder: Path) -> Iterator[Finding]:
    """Leave a file on the first host, and check that the others find it."""
    first, *others = hosts
    left = first.ask("leave", folder=str(folder), name=f".doctor-{uuid.uuid4().hex[:8]}")
    if "error" in left:
        yield Finding("FAIL", first.name, f"the run cannot write: {left['error']}")
        return
    try:
        answers, _ = ask_all(others, lambda host: host.ask("look", path=left["path"]))
    finally:
        first.ask("remove", path=left["path"])
    without = [host.name for host in others if not answers.get(host, {}).get("found")]
    if not without:
        yield Finding("ok", "output", f"{folder} is shared by all hosts")
        return
    yield Finding(
        "FAIL",
        "output",
        f"{folder} is not shared: checkpoints would lack the part of {', '.join(without)}, and the run could not "
        f"resume; put output.path on a file system that all hosts mount",
    )


def judge_network(hosts: Sequence[Host], address: str) -> Iterator[Finding]:
    """Try the port of the first host from each host, and then the collective that training uses."""
    port = int(os.environ.get("MASTER_PORT", DEFAULT_PORT))
    first, *others = hosts

    def try_port(host: Host) -> dict[str, Any]:
        if host == first:
            return host.ask("listen", port=port, guests=len(others), seconds=_PORT_SECONDS)
        return host.ask("call", address=address, port=port, seconds=_PORT_SECONDS)

    answers, silent = ask_all(hosts, try_port)
    reason = silent[first] if first in silent else answers[first].get("error")
    if reason:
        yield Finding("FAIL", first.name, f"port {port} cannot be used: {reason}; set MASTER_PORT to a free one")
        return
    failed = [host for host in others if not answers.get(host, {}).get("reached")]
    for host in failed:
        reason = silent[host] if host in silent else answers[host]["reason"]
        yield Finding("FAIL", host.name, f"cannot reach {first.name} at {address}:{port}: {reason}; check the firewall")
    if not failed:
        yield Finding(
            "ok", "rendezvous", f"port {port} of {first.name} ({address}) is free and reachable from all hosts"
        )
        if others:
            yield judge_reduction(hosts, address, port)


def judge_reduction(hosts: Sequence[Host], address: str, port: int) -> Finding:
    world = len(hosts)
    rank = {host: index for index, host in enumerate(hosts)}
    answers, silent = ask_all(
        hosts,
        lambda host: host.ask("reduce", limit=40, rank=rank[host], world=world, address=address, port=port),
    )
    if silent:
        host, error = next(iter(silent.items()))
        hint = "name the network interface in GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME"
        return Finding("FAIL", "all-reduce", f"hosts cannot connect to each other ({host.name}: {error}); {hint}")
    backend = next(iter(answers.values()))["backend"]
    if not all(answer["right"] for answer in answers.values()):
        return Finding("FAIL", "all-reduce", f"{backend} computed a wrong sum")
    slowest = max(answer["seconds"] for answer in answers.values())
    speed = 2 * (world - 1) / world * 2**20 / slowest / 1e6
    return Finding("ok", "all-reduce", f"1 MB over {backend}: {slowest * 1e3:.2f} ms, {speed:,.0f} MB/s per host")
