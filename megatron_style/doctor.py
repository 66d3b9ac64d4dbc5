"""Everything that would make a launch fail, before it: hosts, network, disk, and the run file against them.

python -m megatron_style.doctor --hostfile hosts run_configs/quickstart.yaml
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from megatron_style.config.command import (
    EXIT_DONE,
    EXIT_FAILED,
    add_json_flag,
    add_set_flag,
    command_parser,
    run_command,
    size,
)
from megatron_style.config.errors import UserError
from megatron_style.config.run import RunConfig, load_run
from megatron_style.data.store import store_files
from megatron_style.runtime.hosts import Host, ask_all, read_hostfile, this_machine
from megatron_style.runtime.launcher import DEFAULT_PORT
from megatron_style.runtime.requirements import bytes_of_checkpoint, check_run

Level = Literal["FAIL", "WARN", "ok"]
Facts = Mapping[Host, Mapping[str, Any]]
_LEVELS: tuple[Level, ...] = ("FAIL", "WARN", "ok")
_GIB = 2**30
_MOST_SKEW = 2.0  # seconds: beyond, times in logs and of files mislead


@dataclass(frozen=True)
class Finding:
    level: Level
    about: str
    told: str


def examine(hosts: Sequence[Host], run: RunConfig | None) -> Iterator[Finding]:
    """From what everything needs to what only this run needs; a host that fell out is not asked again."""
    offsets, unreachable = ask_all(hosts, Host.clock_offset)
    for host, error in unreachable.items():
        yield Finding("FAIL", host.name, f"not reachable by ssh without a password: {error}")
    yield from judge_clocks(offsets)
    if any(host.over_ssh for host in hosts) and shutil.which("pdsh") is None:
        yield Finding("FAIL", "pdsh", "not installed here: `deepspeed --hostfile` needs it; launch/mpi.sh does not")

    folder = run.output.path if run else Path()
    files = [str(path) for prefix in (run.data.train, run.data.valid) for path in store_files(prefix)] if run else []
    facts, silent = ask_all(list(offsets), lambda host: host.ask("facts", folder=str(folder), files=files))
    for host, error in silent.items():
        yield Finding("FAIL", host.name, f"this project does not start there: {error}")
    yield from judge_versions(facts)
    checkpoint = bytes_of_checkpoint(run) if run else None
    for host in facts:
        yield from judge_host(host, facts[host])
        yield judge_disk(host, facts[host]["disk"], checkpoint, kept=run.output.keep_last + 1 if run else 1)
    able = list(facts)
    if len(able) > 1:
        yield from judge_folder(able, folder)
    if able:
        yield from judge_network(able, str(facts[able[0]]["address"]))
    if run and all(host.slots or host in facts for host in hosts):
        yield judge_run(run, sum(host.slots or slots_of(host, facts[host]) for host in hosts))


def judge_clocks(offsets: Mapping[Host, float]) -> Iterator[Finding]:
    apart = max(offsets.values(), default=0) - min(offsets.values(), default=0)
    if apart > _MOST_SKEW:
        ahead, behind = (pick(offsets, key=lambda host: offsets[host]).name for pick in (max, min))
        yield Finding("WARN", "clocks", f"{ahead} is {apart:.1f} s ahead of {behind}; set them by NTP")
    elif len(offsets) > 1:
        yield Finding("ok", "clocks", f"within {apart:.1f} s")


def judge_versions(facts: Facts) -> Iterator[Finding]:
    """The first host is the measure: its ranks save the checkpoints and write the record."""
    if not facts:
        return
    first, *others = facts
    measure = facts[first]["same"]
    differing = 0
    for host in others:
        for name, value in facts[host]["same"].items():
            if value != measure[name]:
                differing += 1
                yield Finding("FAIL", host.name, f"{name} is {value}, on {first.name} it is {measure[name]}")
    if not differing:
        yield Finding("ok", "versions", ", ".join(f"{name} {value}" for name, value in measure.items()))


def judge_host(host: Host, told: Mapping[str, Any]) -> Iterator[Finding]:
    kind, count, slots = told["devices"]["kind"], told["devices"]["count"], slots_of(host, told)
    if slots > count:
        level: Level = "WARN" if kind == "core" else "FAIL"  # cores can be shared, if slowly
        yield Finding(level, host.name, f"{slots} slots, but {count} {kind}(s)")
    elif slots < count and kind != "core":
        yield Finding("WARN", host.name, f"{slots} slots leave {count - slots} of {count} {kind}(s) idle")
    else:
        yield Finding("ok", host.name, f"{slots} slot(s) on {count} {kind}(s)")
    level = "WARN" if told["memory"] < slots * _GIB else "ok"
    yield Finding(level, host.name, f"{size(told['memory'])} of memory are free, for {slots} process(es)")
    if told["missing"]:
        yield Finding("FAIL", host.name, f"cannot read {', '.join(told['missing'])}; prepare it, or share its folder")


def slots_of(host: Host, told: Mapping[str, Any]) -> int:
    """How many processes a launch starts there: without a hostfile one a device, and a CPU is one device."""
    devices = told["devices"]
    return int(host.slots or (1 if devices["kind"] == "core" else devices["count"]))


def judge_disk(host: Host, free: int, checkpoint: int | None, *, kept: int) -> Finding:
    """`kept` counts the next one too, which is written before the oldest is removed."""
    space = f"{size(free)} of disk are free"
    if checkpoint is None:
        return Finding("WARN" if free < _GIB else "ok", host.name, space)
    if free < checkpoint:
        return Finding("FAIL", host.name, f"{space}; one checkpoint takes about {size(checkpoint)}")
    level: Level = "WARN" if free < kept * checkpoint else "ok"
    return Finding(level, host.name, f"{space}; {kept} checkpoints take about {size(kept * checkpoint)}")


def judge_folder(hosts: Sequence[Host], folder: Path) -> Iterator[Finding]:
    """A file that the first host leaves must be there for the others."""
    first, *others = hosts
    left = first.ask("leave", folder=str(folder), name=f".doctor-{uuid.uuid4().hex[:8]}")
    if "error" in left:
        yield Finding("FAIL", first.name, f"the run cannot write: {left['error']}")
        return
    try:
        answers, _ = ask_all(others, lambda host: host.ask("look", path=left["path"]))
    finally:
        first.ask("remove", path=left["path"])
    blind = [host.name for host in others if not answers.get(host, {}).get("found")]
    if not blind:
        yield Finding("ok", "output", f"{folder} is shared by all hosts")
        return
    yield Finding(
        "FAIL",
        "output",
        f"{folder} is not shared: {', '.join(blind)} would keep its part of every checkpoint to itself, and the run "
        f"could not go on from any; put it (output.path) on a file system that all hosts mount",
    )


def judge_network(hosts: Sequence[Host], address: str) -> Iterator[Finding]:
    """The port of the first host, as each host sees it, and then the collective that training waits for."""
    port, (first, *others), seconds = int(os.environ.get("MASTER_PORT", DEFAULT_PORT)), hosts, 10.0

    def try_port(host: Host) -> dict[str, Any]:
        if host == first:
            return host.ask("listen", port=port, guests=len(others), seconds=seconds)
        return host.ask("call", address=address, port=port, seconds=seconds)

    answers, silent = ask_all(hosts, try_port)
    reason = silent[first] if first in silent else answers[first].get("error")
    if reason:
        yield Finding("FAIL", first.name, f"port {port} cannot be used: {reason}; set MASTER_PORT to a free one")
        return
    deaf = [host for host in others if not answers.get(host, {}).get("reached")]
    for host in deaf:
        reason = silent[host] if host in silent else answers[host]["reason"]
        yield Finding("FAIL", host.name, f"cannot reach {first.name} at {address}:{port}: {reason}; a firewall?")
    if not deaf:
        yield Finding("ok", "rendezvous", f"port {port} of {first.name} ({address}) is free, and reached by all hosts")
        if others:
            yield judge_reduction(hosts, address, port)


def judge_reduction(hosts: Sequence[Host], address: str, port: int) -> Finding:
    world, rank = len(hosts), {host: index for index, host in enumerate(hosts)}
    answers, silent = ask_all(
        hosts,
        lambda host: host.ask("reduce", limit=40, rank=rank[host], world=world, address=address, port=port),
    )
    if silent:
        host, error = next(iter(silent.items()))
        hint = "name the network interface in GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME"
        return Finding("FAIL", "all-reduce", f"hosts do not find each other ({host.name}: {error}); {hint}")
    backend = next(iter(answers.values()))["backend"]
    if not all(answer["right"] for answer in answers.values()):
        return Finding("FAIL", "all-reduce", f"{backend} computed a wrong sum")
    slowest = max(answer["seconds"] for answer in answers.values())
    speed = 2 * (world - 1) / world * 2**20 / slowest / 1e6
    return Finding("ok", "all-reduce", f"1 MB over {backend}: {slowest * 1e3:.2f} ms, {speed:,.0f} MB/s a host")


def judge_run(run: RunConfig, world: int) -> Finding:
    try:
        steps = check_run(run, world)
    except UserError as error:
        return Finding("FAIL", "run", str(error))
    return Finding("ok", "run", f"{steps:,} steps on {world} process(es)")


def main() -> None:
    parser = command_parser(
        "doctor",
        "Check hosts, network, disk and run file before a launch. Exit code 1: the launch would fail.",
        "python -m megatron_style.doctor --hostfile hosts run_configs/quickstart.yaml",
    )
    parser.add_argument("run", type=Path, nargs="?", metavar="RUN.yaml")
    add_set_flag(parser)
    parser.add_argument("--hostfile", type=Path, metavar="H", help="lines of `NAME slots=N`; default: this machine")
    add_json_flag(parser)
    args = parser.parse_args()
    hosts = read_hostfile(args.hostfile) if args.hostfile else (this_machine(),)
    run = load_run(args.run, args.settings) if args.run else None
    findings = sorted(examine(hosts, run), key=lambda finding: _LEVELS.index(finding.level))
    show_findings(findings, as_json=args.json)
    raise SystemExit(EXIT_FAILED if any(finding.level == "FAIL" for finding in findings) else EXIT_DONE)


def show_findings(findings: Sequence[Finding], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"findings": [asdict(finding) for finding in findings]}))  # noqa: T201
        return
    width = max(len(finding.about) for finding in findings)
    for finding in findings:
        print(f"{finding.level:<4}  {finding.about:<{width}}  {finding.told}")  # noqa: T201


if __name__ == "__main__":
    run_command(main)
