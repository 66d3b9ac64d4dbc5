"""The entry point `shortformer COMMAND ...`, also `python -m megatron_style COMMAND ...`.

Only the module of the named command is imported, so that help and errors appear at once.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import NoReturn

from megatron_style.base.command import CONSOLE_COMMAND, log, run_command, run_module, say
from megatron_style.base.errors import UserError
from megatron_style.base.files import writing_to
from megatron_style.base.launchers import is_first_of_host
from megatron_style.config.train_arguments import TrainArguments, parse_train_arguments
from megatron_style.supervision.signals import StopSignals, leave_early

COMMANDS: Mapping[str, str] = MappingProxyType(
    {
        "prepare": "make a token store of text",
        "train": "train a model through all its stages",
        "supervise": "train, and resume after a rank or a host dies",
        "evaluate": "score held-out text by a named protocol",
        "generate": "continue text with a model",
        "neighbours": "make a kNN-LM datastore of a text",
        "convert": "convert a model to another format, with proof",
        "report": "make an HTML page about one or several runs",
        "plan": "estimate memory, communication and time of a run",
        "doctor": "check hosts, network and run file before a launch",
        "reproduce": "measure the paper's tables at any scale",
    }
)


def shortformer() -> NoReturn:
    run_command(main)


def main() -> None:
    is_console_command = Path(sys.argv[0]).stem == CONSOLE_COMMAND
    program = CONSOLE_COMMAND if is_console_command else "python -m megatron_style"
    if len(sys.argv) < 2:
        raise UserError(f"a command is missing; `{program} --help` lists them")
    name = sys.argv.pop(1)
    if name in ("-h", "--help"):
        show_help(program)
        return
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        remedy = f"did you mean '{near[0]}'?" if near else f"`{program} --help` lists them"
        raise UserError(f"{name}: no such command; {remedy}")
    if is_console_command:
        sys.argv[0] = f"{CONSOLE_COMMAND} {name}"  # the name in the command's own help
    run_named(name)


def run_named(name: str) -> NoReturn:
    if name == "train":
        _start_training()
    run_module(f"megatron_style.{name}")


def _start_training() -> NoReturn:
    """Read flags and run file and install signal handlers before the imports, which take seconds: what is wrong is
    reported at once, and no signal is lost meanwhile."""
    arguments = parse_train_arguments()
    signals = StopSignals(react=leave_early)
    run_command(lambda: _train(arguments, signals))


def _train(arguments: TrainArguments, signals: StopSignals) -> None:
    # These import pydantic, for which a wrong flag need not wait.
    from megatron_style.config.paths import check_inputs
    from megatron_style.config.run_file import load_run, run_text
    from megatron_style.supervision.finished import what_is_finished

    run = load_run(arguments.run_file, arguments.settings)
    if arguments.print_config:
        say(run_text(run))
        return
    if arguments.trains_on and (done := what_is_finished(run)):
        if is_first_of_host():
            log(done)
        return
    check_inputs(run, arguments.run_file.parent)
    with writing_to(run.output.path):
        import_module("megatron_style.train").train(
            run, signals, resume_from=arguments.resume_from, dry_run=arguments.dry_run, profile=arguments.profile
        )


def show_help(program: str) -> None:
    width = max(map(len, COMMANDS))
    print(f"usage: {program} COMMAND ...\n")  # noqa: T201
    for name, about in COMMANDS.items():
        print(f"  {name:<{width}}  {about}")  # noqa: T201
    print(f"\n`{program} COMMAND --help` shows its flags and an example.")  # noqa: T201


if __name__ == "__main__":
    shortformer()
