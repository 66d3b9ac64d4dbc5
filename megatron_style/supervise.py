"""Train, and resume from the last checkpoint when a rank or a host dies.

python -m megatron_style.supervise --processes 2 run_configs/quickstart.yaml --set output.path=runs/first
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from megatron_style.base.command import command_parser, positive_int, run_command
from megatron_style.base.errors import UserError
from megatron_style.config.run import load_run, seconds_of
from megatron_style.config.train_arguments import add_run_arguments, settings_of
from megatron_style.hosts.hosts import read_hostfile
from megatron_style.supervision.launch_spec import LaunchSpec
from megatron_style.supervision.supervisor import Supervisor


def main() -> None:
    sys.exit(Supervisor(spec_of(parse_args())).run())


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
        raise UserError("--processes is for this machine only; a hostfile says how many with `slots=N`")
    settings = settings_of(args)
    return LaunchSpec(
        run=load_run(args.run, settings),
        arguments=(str(args.run), *(word for setting in settings for word in ("--set", setting))),
        hosts={host.name: host.slots or 1 for host in read_hostfile(args.hostfile)} if args.hostfile else {},
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


if __name__ == "__main__":
    run_command(main)
