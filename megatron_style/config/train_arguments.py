"""The flags of `train`. They are read before torch and DeepSpeed, which take seconds to import."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from megatron_style.base.command import add_set_flag, command_parser


class TrainArguments(NamedTuple):
    run_file: Path
    settings: list[str]  # overrides of the run file
    print_config: bool


def parse_train_arguments(words: Sequence[str] | None = None) -> TrainArguments:
    """Return the arguments, by default those of this process."""
    parser = command_parser(
        "train",
        "Train a Shortformer through all its stages, on one process or under any launcher. "
        "A run that was interrupted resumes from its last checkpoint.",
        "deepspeed --module megatron_style.train run_configs/quickstart.yaml --set output.path=runs/first",
    )
    add_run_arguments(parser)
    parser.add_argument(
        "--print-config", action="store_true", help="print the run file with all defaults and overrides, and exit"
    )
    parser.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)  # launchers may add it
    args = parser.parse_args(words)
    return TrainArguments(args.run, settings_of(args), args.print_config)


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN.yaml")
    add_set_flag(parser)
    parser.add_argument("--deepspeed_config", type=Path, metavar="FILE", help="in place of the run file's `deepspeed`")


def settings_of(args: argparse.Namespace) -> list[str]:
    settings: list[str] = args.settings
    return settings + ([f"deepspeed={args.deepspeed_config}"] if args.deepspeed_config else [])
