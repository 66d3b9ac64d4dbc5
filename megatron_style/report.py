"""Make an HTML page about one or several runs.

python -m megatron_style.report runs/quickstart --output report.html
"""

from __future__ import annotations

if __name__ == "__main__":
    from megatron_style import start

    start("report")  # imports this file

import argparse
from pathlib import Path

from megatron_style.base.command import add_json_flag, command_parser, show
from megatron_style.base.errors import UserError
from megatron_style.base.files import write_atomic
from megatron_style.reporting.history import read_runs
from megatron_style.reporting.page import is_page, page
from megatron_style.reporting.style import RUN_COLOURS

DEFAULT_NAME = "report.html"
MOST_RUNS = len(RUN_COLOURS["light"])  # more would share colours


def main() -> None:
    args = parse_args()
    if len(args.runs) > MOST_RUNS:
        raise UserError(f"RUN_DIR: {len(args.runs)} runs are given; a page compares {MOST_RUNS} at most")
    runs = read_runs(args.runs)
    if args.output is None:
        args.output = args.runs[0] / DEFAULT_NAME if len(args.runs) == 1 else Path(DEFAULT_NAME)
    if not args.output.parent.is_dir() or args.output.is_dir():
        raise UserError(f"--output {args.output}: must be a file in a folder that exists")
    if args.output.is_file() and not args.overwrite and not is_page(args.output):
        raise UserError(f"--output {args.output}: exists and is not a report; use --overwrite to replace it")
    try:
        write_atomic(args.output, page(runs))
    except OSError as error:
        raise UserError(f"--output {args.output}: cannot be written: {error.strerror}; name another file") from None
    show({"output": str(args.output), "runs": len(runs)}, as_json=args.json)


def parse_args() -> argparse.Namespace:
    parser = command_parser(
        "report",
        "Make a self-contained HTML page about one or several runs.",
        "python -m megatron_style.report runs/quickstart runs/baseline --output report.html",
    )
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN_DIR")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="report.html",
        help="default: in RUN_DIR; of several runs: here",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace a file that is not a report")
    add_json_flag(parser)
    return parser.parse_args()
