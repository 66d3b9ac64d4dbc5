"""Check hosts, network, disk and run file before a launch.

python -m megatron_style.doctor --hostfile hosts run_configs/quickstart.yaml
python -m megatron_style.doctor run_configs/shortformer_1b3.yaml --set data.vocab_size=50000 --rehearse 64
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_style.base.command import (
    EXIT_DONE,
    EXIT_FAILED,
    add_json_flag,
    add_set_flag,
    command_parser,
    positive_int,
    run_command,
    say,
    show_table,
)
from megatron_style.base.errors import UserError
from megatron_style.base.findings import Finding, worst_first
from megatron_style.base.units import size
from megatron_style.config.run import RunConfig, load_run
from megatron_style.data.store import store_files
from megatron_style.engine.requirements import bytes_of_checkpoint, judge_run
from megatron_style.hosts.diagnosis import Demands, diagnose
from megatron_style.hosts.hosts import read_hostfile, this_machine
from megatron_style.planning.estimate import USABLE
from megatron_style.planning.hardware import bytes_of, gpu_named
from megatron_style.rehearsal.findings import judge_rehearsal

if TYPE_CHECKING:
    from megatron_style.rehearsal.rehearsal import Rehearsal

_DEFAULT_GPU = "a100-80gb"


def main() -> None:
    args = parse_args()
    run = load_run(args.run, args.settings) if args.run else None
    if args.rehearse is not None:
        assert run is not None
        rehearsal = rehearse_run(run, args)
        findings = worst_first(judge_rehearsal(run, rehearsal))
        show_findings(findings, rehearsal, as_json=args.json)
    else:
        findings = worst_first(check_hosts(args.hostfile, run))
        show_findings(findings, as_json=args.json)
    raise SystemExit(EXIT_FAILED if any(finding.level == "FAIL" for finding in findings) else EXIT_DONE)


def check_hosts(hostfile: Path | None, run: RunConfig | None) -> list[Finding]:
    hosts = read_hostfile(hostfile) if hostfile else (this_machine(),)
    diagnosis = diagnose(hosts, demands_of(run) if run else Demands())
    findings = list(diagnosis.findings)
    if run and diagnosis.processes is not None:
        findings.append(judge_run(run, diagnosis.processes))
    return findings


def demands_of(run: RunConfig) -> Demands:
    return Demands(
        folder=run.output.path,
        files=(*store_files(run.data.train), *store_files(run.data.valid)),
        checkpoint_bytes=bytes_of_checkpoint(run),
        checkpoints=run.output.keep_last + 1,  # the next one is written before the oldest is removed
    )


def rehearse_run(run: RunConfig, args: argparse.Namespace) -> Rehearsal:
    gpu = gpu_named(args.gpu or _DEFAULT_GPU)
    memory = bytes_of(args.gpu_memory, "--gpu-memory") if args.gpu_memory else gpu.memory
    os.environ["DS_ACCELERATOR"] = "cpu"  # DeepSpeed reads it on import; fake tensors need no GPU
    from megatron_style.rehearsal.rehearsal import rehearse  # takes seconds

    return rehearse(run, ranks=args.rehearse, rank=args.rank or 0, usable=USABLE * memory)


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
        "--rehearse", type=positive_int, metavar="RANKS",
        help="run a step of each stage as one rank of RANKS, on fake tensors: needs no GPU, no hosts, and no corpus if "
        "data.vocab_size is set",
    )  # fmt: skip
    parser.add_argument("--rank", type=int, metavar="R", help="the rank to rehearse; default: 0")
    parser.add_argument("--gpu", metavar="NAME", help=f"the GPU of the rehearsal; default: {_DEFAULT_GPU}")
    parser.add_argument("--gpu-memory", metavar="32GB", help="default: that of the GPU")
    add_json_flag(parser)
    args = parser.parse_args()
    check_flags(args)
    return args


def check_flags(args: argparse.Namespace) -> None:
    """Refuse flags that would be ignored."""
    if args.rehearse is None:
        for flag in ("rank", "gpu", "gpu_memory"):
            if getattr(args, flag) is not None:
                raise UserError(f"--{flag.replace('_', '-')}: belongs to a rehearsal; give --rehearse RANKS too")
        return
    if args.run is None:
        raise UserError("--rehearse: needs a run to rehearse; give a RUN.yaml")
    if args.hostfile is not None:
        raise UserError("--hostfile: a rehearsal asks no hosts; leave it out, or check the hosts without --rehearse")


def show_findings(findings: Sequence[Finding], rehearsal: Rehearsal | None = None, *, as_json: bool) -> None:
    if as_json:
        result: dict[str, Any] = {"findings": [asdict(finding) for finding in findings]}
        if rehearsal is not None:
            result["rehearsal"] = asdict(rehearsal)
        print(json.dumps(result))  # noqa: T201
        return
    width = max(len(finding.subject) for finding in findings)
    for finding in findings:
        say(f"{finding.level:<4}  {finding.subject:<{width}}  {finding.message}\n")
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
