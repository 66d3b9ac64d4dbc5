"""Check hosts, network, disk and run file before a launch.

python -m megatron_style.doctor --hostfile hosts run_configs/quickstart.yaml
python -m megatron_style.doctor run_configs/shortformer_1b3.yaml --set data.vocab_size=50000 --rehearse 64
"""

from __future__ import annotations

if __name__ == "__main__":
    from megatron_style import start

    start("doctor")  # imports this file

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
    Finding,
    add_json_flag,
    add_set_flag,
    command_parser,
    positive_int,
    say,
    show_table,
    worst_first,
)
from megatron_style.base.errors import UserError
from megatron_style.config.run import RunConfig
from megatron_style.config.run_file import load_run
from megatron_style.hosts.hosts import read_hostfile, this_machine
from megatron_style.planning.estimate import USABLE
from megatron_style.planning.hardware import bytes_of, gpu_named
from megatron_style.rehearsal.findings import compare_with_plan, judge_rehearsal
from megatron_style.rehearsal.requirements import check_hosts

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
        hosts = read_hostfile(args.hostfile) if args.hostfile else (this_machine(),)
        findings = worst_first(check_hosts(hosts, run))
        show_findings(findings, as_json=args.json)
    raise SystemExit(EXIT_FAILED if any(finding.level == "FAIL" for finding in findings) else EXIT_DONE)


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
        show_table(*compare_with_plan(rehearsal))
