"""Everything that would make a launch fail, before it: hosts, network, disk, and the run file against them.

python -m megatron_style.doctor --hostfile hosts run_configs/quickstart.yaml
python -m megatron_style.doctor run_configs/shortformer_1b3.yaml --set data.vocab_size=50000 --rehearse 64
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from megatron_style.base.command import (
    EXIT_DONE,
    EXIT_FAILED,
    add_json_flag,
    add_set_flag,
    command_parser,
    run_command,
    say,
    show_table,
)
from megatron_style.base.errors import UserError
from megatron_style.base.units import size
from megatron_style.config.run import RunConfig, load_run
from megatron_style.data.store import store_files
from megatron_style.engine.requirements import bytes_of_checkpoint, check_run
from megatron_style.hosts.hosts import Host, ask_all, read_hostfile, this_machine
from megatron_style.hosts.launcher import DEFAULT_PORT
from megatron_style.planning.estimate import USABLE
from megatron_style.planning.hardware import bytes_of, gpu_named

if TYPE_CHECKING:
    from megatron_style.rehearsal.rehearsal import Rehearsal, StageRehearsal

Level = Literal["FAIL", "WARN", "ok"]
Facts = Mapping[Host, Mapping[str, Any]]
_LEVELS: tuple[Level, ...] = ("FAIL", "WARN", "ok")
_GIB = 2**30
_DEFAULT_GPU = "a100-80gb"
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


def rehearse_run(run: RunConfig, args: argparse.Namespace) -> Rehearsal:
    gpu = gpu_named(args.gpu or _DEFAULT_GPU)
    memory = bytes_of(args.gpu_memory, "--gpu-memory") if args.gpu_memory else gpu.memory
    os.environ["DS_ACCELERATOR"] = "cpu"  # DeepSpeed reads it on import; fake tensors need no GPU
    from megatron_style.rehearsal.rehearsal import rehearse  # takes seconds

    return rehearse(run, ranks=args.rehearse, rank=args.rank or 0, usable=USABLE * memory)


def judge_rehearsal(run: RunConfig, rehearsal: Rehearsal) -> Iterator[Finding]:
    if rehearsal.failure is not None:
        passed = f"{len(rehearsal.stages)} of {len(run.stages)} stages passed before"
        yield Finding("FAIL", "rehearsal", f"{rehearsal.failure}; {passed}")
    for rehearsed in rehearsal.stages:
        yield judge_stage(rehearsed, rehearsal.usable)
    told = "shapes, devices and memory are rehearsed; numbers, speed and messages between ranks are not"
    yield Finding("ok", f"rank {rehearsal.rank}", f"one of {rehearsal.ranks:,}: {told}")


def judge_stage(rehearsed: StageRehearsal, usable: float) -> Finding:
    about = f"stage {rehearsed.stage.index + 1}"
    peaks = f"peak {size(rehearsed.peak)}, planned {size(rehearsed.planned)}"
    if rehearsed.remedy is not None:
        return Finding("FAIL", about, f"{peaks}: more than the {size(usable)} that are usable; {rehearsed.remedy}")
    return Finding("ok", about, f"{peaks}, usable {size(usable)}")


def judge_corpus(run: RunConfig, world: int) -> Finding:
    """Without a corpus, only what the rehearsal itself needs has been checked."""
    missing = [str(path) for prefix in (run.data.train, run.data.valid) for path in store_files(prefix)
               if not path.is_file()]  # fmt: skip
    if missing:
        told = f"cannot read {', '.join(missing)}; token ids follow Zipf's law, and the number of steps is not checked"
        return Finding("WARN", "run", told)
    return judge_run(run, world)


def main() -> None:
    args = parse_args()
    run = load_run(args.run, args.settings) if args.run else None
    if args.rehearse is not None:
        assert run is not None
        rehearsal = rehearse_run(run, args)
        findings = worst_first([*judge_rehearsal(run, rehearsal), judge_corpus(run, args.rehearse)])
        show_findings(findings, rehearsal, as_json=args.json)
    else:
        hosts = read_hostfile(args.hostfile) if args.hostfile else (this_machine(),)
        findings = worst_first(examine(hosts, run))
        show_findings(findings, as_json=args.json)
    raise SystemExit(EXIT_FAILED if any(finding.level == "FAIL" for finding in findings) else EXIT_DONE)


def parse_args() -> argparse.Namespace:
    parser = command_parser(
        "doctor",
        "Check hosts, network, disk and run file before a launch. Exit code 1: the launch would fail.",
        "python -m megatron_style.doctor --hostfile hosts run_configs/quickstart.yaml",
    )
    parser.add_argument("run", type=Path, nargs="?", metavar="RUN.yaml")
    add_set_flag(parser)
    parser.add_argument("--hostfile", type=Path, metavar="H", help="lines of `NAME slots=N`; default: this machine")
    parser.add_argument(
        "--rehearse", type=int, metavar="RANKS",
        help="do a step of each stage as one rank of RANKS, on fake tensors: needs no GPU, no hosts, and no corpus if "
        "data.vocab_size is set",
    )  # fmt: skip
    parser.add_argument("--rank", type=int, metavar="R", help="which rank is rehearsed; default: 0")
    parser.add_argument("--gpu", metavar="NAME", help=f"whose memory a rehearsal may use; default: {_DEFAULT_GPU}")
    parser.add_argument("--gpu-memory", metavar="32GB", help="default: what the GPU has")
    add_json_flag(parser)
    args = parser.parse_args()
    check_flags(args)
    return args


def check_flags(args: argparse.Namespace) -> None:
    """A flag that would be ignored is refused."""
    if args.rehearse is None:
        for flag in ("rank", "gpu", "gpu_memory"):
            if getattr(args, flag) is not None:
                raise UserError(f"--{flag.replace('_', '-')}: belongs to a rehearsal; give --rehearse RANKS too")
        return
    if args.run is None:
        raise UserError("--rehearse: needs the run that is rehearsed; give a RUN.yaml")
    if args.hostfile is not None:
        raise UserError("--hostfile: a rehearsal asks no hosts; leave it out, or check the hosts without --rehearse")


def worst_first(findings: Iterable[Finding]) -> list[Finding]:
    return sorted(findings, key=lambda finding: _LEVELS.index(finding.level))


def show_findings(findings: Sequence[Finding], rehearsal: Rehearsal | None = None, *, as_json: bool) -> None:
    if as_json:
        result: dict[str, Any] = {"findings": [asdict(finding) for finding in findings]}
        if rehearsal is not None:
            result["rehearsal"] = asdict(rehearsal)
        print(json.dumps(result))  # noqa: T201
        return
    width = max(len(finding.about) for finding in findings)
    for finding in findings:
        say(f"{finding.level:<4}  {finding.about:<{width}}  {finding.told}\n")
    if rehearsal is not None and rehearsal.stages:
        show_rehearsal(rehearsal)


def show_rehearsal(rehearsal: Rehearsal) -> None:
    stages = rehearsal.stages
    show_table(
        [f"rank {rehearsal.rank} of {rehearsal.ranks}", *(f"stage {each.stage.index + 1}" for each in stages)],
        [
            ["forward and backward", *(size(each.passes) for each in stages)],
            ["update", *(size(each.update) for each in stages)],
            ["rehearsed peak", *(size(each.peak) for each in stages)],
            ["planned peak", *(size(each.planned) for each in stages)],
            ["rehearsed against planned", *(f"{each.peak / each.planned - 1:+.1%}" for each in stages)],
        ],
    )


if __name__ == "__main__":
    run_command(main)
