"""Measure the paper's tables at any scale, next to the paper's own figures. docs/reproducing.md is the guide.

python -m megatron_style.reproduce --table 1 --scale tiny --output runs/paper_tables
"""

from __future__ import annotations

if __name__ == "__main__":
    from megatron_style import start

    start("reproduce")  # imports this file

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path

from megatron_style.base.command import (
    add_json_flag,
    command_parser,
    log,
    positive_int,
    say,
    show,
    show_table,
)
from megatron_style.base.errors import UserError
from megatron_style.paper.experiment import Experiment, open_experiment
from megatron_style.paper.measures import Table
from megatron_style.paper.results.page import Results, write_results
from megatron_style.paper.results.presented import Presented, as_json, gaps
from megatron_style.paper.scale import SCALES, ExperimentScale, scale_named
from megatron_style.paper.tables import table
from megatron_style.paper.work.jobs import emit, jobs_at_once, measure
from megatron_style.paper.work.ownership import sole_owner
from megatron_style.paper.work.records import runs_in

TABLES = range(1, 13)


def main() -> None:
    args = parse_args()
    check(args)
    scale = scale_named(args.scale)
    tables = [table(number).at(scale) for number in dict.fromkeys(args.table)]
    experiment = open_experiment(scale, tables, corpus=args.corpus, output=args.output, seeds=args.seeds)
    check_seed(args.only_seed, experiment.seeds)
    if args.emit:
        show_commands(emit(experiment, tables, only_seed=args.only_seed), as_json=args.json)
        return
    if not args.collect:
        check_faiss(scale, tables)
        needs_runs = bool(experiment.runs_of(tables))
        at_once = jobs_at_once(args.jobs, scale, has_gpus=has_gpus()) if needs_runs else 1
        with sole_owner(args.output):
            measure(experiment, tables, at_once=at_once, kept=args.kept, only_seed=args.only_seed)
    show_results(experiment, write_results(experiment, tables), in_json=args.json)


def parse_args() -> argparse.Namespace:
    parser = command_parser(
        "reproduce",
        "Train and evaluate the runs of the paper's tables, print the tables next to the paper's figures, and test the "
        "paper's claims. Started again, it resumes.",
        "python -m megatron_style.reproduce --table 1 --scale tiny --output runs/paper_tables",
    )
    add = parser.add_argument
    add("--table", type=int, nargs="+", choices=TABLES, required=True, metavar="N", help="1 to 12")
    add("--scale", default="tiny", metavar="NAME", help=f"one of {', '.join(SCALES)} (tiny)")
    add(
        "--corpus", type=Path, metavar="DIR",
        help="a prepared corpus, or text files named train, valid and test; default: the built-in one",
    )  # fmt: skip
    add("--seeds", type=positive_int, metavar="N", help="runs per row; default: that of the scale")
    add("--only-seed", type=positive_int, metavar="K", help="work on this one of the seeds, another machine on another")
    add("--jobs", type=positive_int, metavar="N", help="runs at once; default: one per CPU, one on GPUs")
    add(
        "--kept", type=Path, nargs="+", default=[], metavar="DIR",
        help="results of earlier calls: runs whose records there are complete are not trained again",
    )  # fmt: skip
    add("--emit", action="store_true", help="print the commands without running them")
    add("--collect", action="store_true", help="make the tables from what is measured, and run nothing")
    add("--output", type=Path, required=True, metavar="DIR", help="runs, evaluations and results")
    add_json_flag(parser)
    return parser.parse_args()


def check(args: argparse.Namespace) -> None:
    if args.output.exists() and not args.output.is_dir():
        raise UserError(f"--output {args.output}: is a file; expected a folder, or a name for a new one")
    if args.collect and not args.output.is_dir():
        raise UserError(f"--collect: {args.output} does not exist; give the --output of an earlier call")
    if args.emit and (args.collect or args.kept):
        raise UserError("--emit: prints the commands of all runs; leave out --collect and --kept")
    if args.collect and args.only_seed:
        raise UserError("--collect: shows what is measured with any seed; leave out --only-seed")
    for results in args.kept:
        runs_in(results)


def check_seed(only: int | None, seeds: int) -> None:
    if only and only > seeds:
        raise UserError(f"--only-seed {only}: the seeds are 1 to {seeds}; raise --seeds, or choose one of them")


def check_faiss(scale: ExperimentScale, tables: Sequence[Table]) -> None:
    """Refuse to train models whose neighbours could not be searched."""
    if scale.probe is None or not any(each.neighbours for table in tables for each in table.evaluations()):
        return
    from megatron_style.datastore.approximate import import_faiss  # torch takes a second to import

    import_faiss(f"--scale {scale.name}: the approximate search of kNN-LM")


def has_gpus() -> bool:
    from megatron_style.hosts.launcher import accelerator  # torch takes a second to import

    return accelerator().type != "cpu"


def show_commands(commands: Sequence[Sequence[str]], *, as_json: bool) -> None:
    lines = [shlex.join(command) for command in commands]
    if as_json:
        show({"commands": lines}, as_json=True)
        return
    for line in lines:
        say(f"{line}\n")
    log("after these, run the same command without --emit: it evaluates the models and makes the tables")


def show_results(experiment: Experiment, results: Results, *, in_json: bool) -> None:
    if in_json:
        result = {
            "scale": experiment.scale.name,
            "seeds": experiment.seeds,
            "results": str(results.page),
            "tables": [as_json(presented) for presented in results.tables],
        }
        show(result, as_json=True)
        return
    for presented in results.tables:
        show_presented(presented)
    show({"results": str(results.page)}, as_json=False)


def show_presented(presented: Presented) -> None:
    show({f"table {presented.table.number}": presented.table.title}, as_json=False)
    show_table(presented.header, presented.lines)
    for claim, outcome in presented.outcomes:
        show({outcome.state: f"{claim.text} {outcome.evidence}"}, as_json=False)
    for gap in gaps(presented):
        show({"incomplete": gap}, as_json=False)
