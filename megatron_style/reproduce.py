"""The paper's tables, measured at any scale, beside the paper's. docs/reproducing.md is the guide.

python -m megatron_style.reproduce --table 1 --scale tiny --output runs/paper_tables
"""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from megatron_style.base.command import add_json_flag, command_parser, log, run_command, show, show_table
from megatron_style.base.errors import UserError
from megatron_style.data.workers import usable_cpus
from megatron_style.paper.corpus import check_test_split, find_source, write_held_out
from megatron_style.paper.experiment import Experiment, check_record, findings_of, write_record
from megatron_style.paper.jobs import Job, evaluate_all, run_jobs, train_all, train_command, write_run_files
from megatron_style.paper.measures import Table
from megatron_style.paper.page import Presented, as_json, present, write_results
from megatron_style.paper.runs import RunSpec
from megatron_style.paper.scale import SCALES, scale_named
from megatron_style.paper.tables import table

TABLES = range(1, 13)


def main() -> None:
    args = parse_args()
    experiment, tables = open_experiment(args)
    specs = list(experiment.seeded([spec for table in tables for spec in table.needs()]))
    if args.emit:
        emit(experiment, specs, args)
        return
    at_once = jobs_at_once(args.jobs, experiment) if specs else 1
    write_record(experiment)
    if specs:
        prepare(experiment)
        work(experiment, tables, specs, at_once=at_once, threads=threads_each(at_once))
    deliver(experiment, tables, as_json=args.json)


def parse_args() -> argparse.Namespace:
    parser = command_parser(
        "reproduce",
        "A table of the paper, measured: its runs are trained and evaluated, the table is printed beside the paper's, "
        "and the paper's claims are tested. Started again, it goes on where it stopped.",
        "python -m megatron_style.reproduce --table 1 --scale tiny --output runs/paper_tables",
    )
    parser.add_argument("--table", type=int, nargs="+", choices=TABLES, required=True, metavar="N", help="1 to 12")
    parser.add_argument("--scale", default="tiny", metavar="NAME", help=f"one of {', '.join(SCALES)} (tiny)")
    parser.add_argument(
        "--corpus", type=Path, metavar="DIR",
        help="a prepared corpus, or text files named train, valid and test; default: the built-in one",
    )  # fmt: skip
    parser.add_argument("--seeds", type=int, metavar="N", help="runs of each row; default: the scale's")
    parser.add_argument("--jobs", type=int, metavar="N", help="runs at once; default: one for each CPU, one on GPUs")
    parser.add_argument("--emit", action="store_true", help="print the commands, and run nothing")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="runs, evaluations and results")
    add_json_flag(parser)
    return parser.parse_args()


def open_experiment(args: argparse.Namespace) -> tuple[Experiment, list[Table]]:
    for flag in ("seeds", "jobs"):
        if getattr(args, flag) is not None and getattr(args, flag) < 1:
            raise UserError(f"--{flag} is {getattr(args, flag)}; it must be at least 1")
    if args.output.exists() and not args.output.is_dir():
        raise UserError(f"--output {args.output}: is a file; expected a folder, or a name for a new one")
    scale = scale_named(args.scale)
    tables = [table(number).at(scale) for number in dict.fromkeys(args.table)]
    needs = [(spec, evaluation) for table in tables for spec, found in table.needs().items() for evaluation in found]
    texts = {spec.text for table in tables for spec in table.needs()}
    if scale.is_paper and len(texts) > 1:
        raise UserError("--table: 11 and 12 are of Toronto Books, the others of WikiText-103; use a folder for each")
    source = find_source(args.corpus, scale, sorted(texts), args.output)
    if any(evaluation.split == "test" for _, evaluation in needs):
        check_test_split(source)
    experiment = Experiment(scale, source, args.output, args.seeds or scale.seeds)
    check_record(experiment)
    return experiment, tables


def jobs_at_once(wanted: int | None, experiment: Experiment) -> int:
    from megatron_style.hosts.launcher import accelerator  # torch takes a second, and is needed only here

    has_gpus, processes = accelerator().type != "cpu", experiment.scale.processes
    if processes > 1 and not has_gpus:
        raise UserError(
            f"--scale {experiment.scale.name}: needs {processes} GPUs, and there are none here; "
            f"--emit prints the commands for a machine that has them"
        )
    if processes > 1 and wanted not in (None, 1):
        raise UserError(f"--jobs {wanted}: runs of {processes} processes go one at a time; leave it out")
    return wanted or (1 if has_gpus else usable_cpus())


def threads_each(at_once: int) -> int:
    """More threads than idle cores wait for one another: who knows of other work sets the variable."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    return int(given) if given.isdigit() and int(given) else max(1, usable_cpus() // at_once)


def prepare(experiment: Experiment) -> None:
    source, output = experiment.source, experiment.output
    if not source.is_ready:
        assert source.prepare is not None
        run_jobs(
            [Job("prepare the corpus", source.prepare, output / "prepare.log", output / "prepare.out")],
            at_once=1,
            threads=usable_cpus(),
        )
    write_held_out(source, experiment.corpus, experiment.scale, output)


def work(
    experiment: Experiment, tables: Sequence[Table], specs: Sequence[RunSpec], *, at_once: int, threads: int
) -> None:
    train_all(experiment, specs, at_once=at_once, threads=threads)
    needs = {
        (experiment.folder(seeded), evaluation): (seeded, evaluation)
        for table in tables
        for spec, evaluations in table.needs().items()
        for seeded in experiment.seeded([spec])
        for evaluation in sorted(evaluations, key=lambda each: each.name)
    }  # tables share runs: by folder, so that none is evaluated twice
    evaluate_all(experiment, list(needs.values()), at_once=at_once, threads=threads)


def emit(experiment: Experiment, specs: Sequence[RunSpec], args: argparse.Namespace) -> None:
    """Every run whole: those that could begin with another's checkpoint give the same either way."""
    source = experiment.source
    specs = [spec for spec in specs if not experiment.is_finished(spec)]
    if specs and not source.is_ready and not experiment.scale.is_paper:
        raise UserError(f"--emit: {source.folder} must be prepared first: {shlex.join(source.prepare or ())}")
    write_record(experiment)
    if source.is_ready and specs:
        write_held_out(source, experiment.corpus, experiment.scale, experiment.output)  # the runs validate on it
    write_run_files(experiment, specs)
    commands = [source.prepare or ()] if specs and not source.is_ready else []
    commands += [train_command(experiment.config(spec), experiment.scale.processes) for spec in specs]
    if args.json:
        show({"commands": [shlex.join(command) for command in commands]}, as_json=True)
        return
    for command in commands:
        print(shlex.join(command))  # noqa: T201
    log("then the same command without --emit evaluates the models and makes the tables")


def deliver(experiment: Experiment, tables: Sequence[Table], *, as_json: bool) -> None:
    """The page has every table that is complete by now; what is printed are those that were asked for."""
    known = experiment.tables()
    found = findings_of(experiment, known)
    complete = [presented for presented in (present(table, found) for table in known) if presented.is_complete]
    runs = experiment.seeded([spec for table in known for spec in table.needs()])
    page = write_results(experiment, complete, [spec for spec in runs if experiment.is_finished(spec)])
    wanted = [present(table, found) for table in tables]
    if as_json:
        show(_result(experiment, wanted, page), as_json=True)
        return
    for presented in wanted:
        show_presented(presented)
    show({"results": str(page)}, as_json=False)


def show_presented(presented: Presented) -> None:
    show({f"table {presented.table.number}": presented.table.title}, as_json=False)
    show_table(presented.header, presented.lines)
    for claim, outcome in presented.outcomes:
        show({outcome.state: f"{claim.text} {outcome.evidence}"}, as_json=False)


def _result(experiment: Experiment, tables: Sequence[Presented], page: Path) -> dict[str, object]:
    return {
        "scale": experiment.scale.name,
        "seeds": experiment.seeds,
        "results": str(page),
        "tables": [as_json(presented) for presented in tables],
    }


if __name__ == "__main__":
    run_command(main)
