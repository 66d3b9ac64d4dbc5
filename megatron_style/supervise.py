"""Train, and resume from the last checkpoint when a rank or a host dies.

python -m megatron_style.supervise --processes 2 run_configs/quickstart.yaml --set output.path=runs/first
"""

from __future__ import annotations

if __name__ == "__main__":
    from megatron_style import start

    start("supervise")  # imports this file

import argparse
import sys
from itertools import chain
from pathlib import Path

from megatron_style.base.command import command_parser, log, positive_int
from megatron_style.base.errors import UserError
from megatron_style.config.run import seconds_of
from megatron_style.config.run_file import load_run
from megatron_style.config.train_arguments import add_run_arguments, settings_of
from megatron_style.hosts.hosts import read_hostfile
from megatron_style.supervision.finished import what_is_finished
from megatron_style.supervision.supervisor import LaunchSpec, Supervisor


def main() -> None:
    spec = spec_of(parse_args())
    if done := what_is_finished(spec.run):
        log(done)
        return
    sys.exit(Supervisor(spec).run())


def parse_args() -> argparse.Namespace:
    parser = command_parser(
        "supervise",
        "Train, and resume from the last checkpoint when a rank or a host dies.",
        "./launch/supervise.sh --hostfile hosts --retries 5 run_configs/quickstart.yaml --set output.path=runs/first",
    )
    parser.add_argument("--hostfile", type=Path, metavar="FILE", help="lines of `host slots=N`; default: this machine")
    parser.add_argument(
        "--processes", type=positive_int, metavar="N", help="ranks on this machine; default: one per accelerator"
    )
    parser.add_argument(
        "--retries", type=int, default=5, metavar="N",
        help="give up after more than N failures in a row without a new checkpoint",
    )  # fmt: skip
    parser.add_argument("--pause", type=_duration, default=5.0, metavar="5s", help="before a retry; doubles each time")
    parser.add_argument(
        "--stall", type=_duration, default=1800.0, metavar="30m", help="end an attempt after this long without a step"
    )
    add_run_arguments(parser)
    return parser.parse_args()


def spec_of(args: argparse.Namespace) -> LaunchSpec:
    if args.hostfile and args.processes:
        raise UserError("--processes: is for this machine only; in a hostfile, set `slots=N`")
    settings = settings_of(args)
    hosts = read_hostfile(args.hostfile) if args.hostfile else ()
    overrides = chain.from_iterable(("--set", setting) for setting in settings)
    return LaunchSpec(
        run=load_run(args.run, settings),
        arguments=(str(args.run), *overrides),
        hosts={host.name: host.slots or 1 for host in hosts},
        processes=args.processes,
        retries=args.retries,
        pause=args.pause,
        stall=args.stall,
    )


def _duration(text: str) -> float:
    try:
        return seconds_of(text)
    except (ValueError, KeyError):
        raise argparse.ArgumentTypeError(f"{text!r} is not a duration; use for example 90s, 30m or 2h") from None
