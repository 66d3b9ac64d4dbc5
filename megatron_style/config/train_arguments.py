"""The flags of `train`. They are read before torch and DeepSpeed, which take seconds to import."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from megatron_style.base.command import add_set_flag, command_parser, positive_int


class TrainArguments(NamedTuple):
    run_file: Path
    settings: list[str]  # overrides of the run file
    print_config: bool = False
    dry_run: bool = False
    resume_from: int | None = None  # the step of a checkpoint; default: the newest
    profile: int | None = None  # steps

    @property
    def only_checks(self) -> bool:
        """True if nothing will be trained or written."""
        return self.print_config or self.dry_run

    @property
    def trains_on(self) -> bool:
        """True if the run is to continue wherever it is, so that there is nothing to do for a finished one."""
        return not self.only_checks and self.resume_from is None


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
    parser.add_argument("--dry-run", action="store_true", help="stop before the first step, after all checks")
    parser.add_argument(
        "--resume-from", type=positive_int, metavar="STEP",
        help="resume from the checkpoint of this step, and set later ones aside; default: from the newest",
    )  # fmt: skip
    parser.add_argument(
        "--profile", type=positive_int, metavar="N",
        help="profile N steps of the first rank, after two: a trace and, on GPUs, a memory snapshot, in profile/",
    )  # fmt: skip
    parser.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)  # launchers may add it
    args = parser.parse_args(words)
    return TrainArguments(args.run, settings_of(args), args.print_config, args.dry_run, args.resume_from, args.profile)


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN.yaml")
    add_set_flag(parser)
    parser.add_argument("--deepspeed_config", type=Path, metavar="FILE", help="in place of the run file's `deepspeed`")


def settings_of(args: argparse.Namespace) -> list[str]:
    settings: list[str] = args.settings
    return settings + ([f"deepspeed={args.deepspeed_config}"] if args.deepspeed_config else [])
