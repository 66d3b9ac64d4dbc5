"""What all commands share: exit codes, where results go, and how they look."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn, TypeVar

from megatron_style.base.errors import Diverged, RunFailed, Stopped, UserError, harmless
from megatron_style.base.launchers import is_first_of_host

CONSOLE_COMMAND = "shortformer"
Value = TypeVar("Value")
EXIT_DONE, EXIT_FAILED, EXIT_BAD_INPUT, EXIT_STOPPED, EXIT_DIVERGED, EXIT_INTERRUPTED = 0, 1, 2, 75, 76, 130


class _OneLineParser(argparse.ArgumentParser):
    """A wrong flag is told like any other wrong input: in one line."""

    def error(self, message: str) -> NoReturn:
        log(f"error: {message.removeprefix('argument ')}; `{self.prog} --help` shows what there is")
        sys.exit(EXIT_BAD_INPUT)


def command_parser(name: str, about: str, example: str) -> argparse.ArgumentParser:
    by_console = f"{CONSOLE_COMMAND} {name}"
    return _OneLineParser(
        prog=by_console if sys.argv[0] == by_console else f"python -m megatron_style.{name}",
        description=about,
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def positive_int(text: str) -> int:
    """Read the value of a flag that counts something."""
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def output_file(text: str) -> Path:
    """Read the value of a flag that names a file to write."""
    path = Path(text)
    if not path.parent.is_dir() or path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} must be a file in a folder that exists")
    return path


def argument_type(convert: Callable[[str], Value]) -> Callable[[str], Value]:
    """Return the `type` of an argument whose refusal is shown as it is: argparse would replace the message of a
    UserError, which is a ValueError, by one of its own."""

    def converted(text: str) -> Value:
        try:
            return convert(text)
        except UserError as error:
            log(f"error: {error}")
            sys.exit(EXIT_BAD_INPUT)

    return converted


def add_json_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")


def add_set_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set", action="append", default=[], dest="settings",
        metavar="section.key=value", help="in place of the run file's value; as often as needed",
    )  # fmt: skip


def run_command(main: Callable[[], None]) -> NoReturn:
    """Run a command's main and leave with the exit code that interface promises."""
    try:
        main()
    except UserError as error:
        if is_first_of_host():  # all its processes make the same mistake: say it once
            log(f"error: {error}")
        sys.exit(EXIT_BAD_INPUT)
    except Stopped as reason:
        if os.environ.get("RANK", "0") == "0":
            log(str(reason))
        sys.exit(EXIT_STOPPED)
    except KeyboardInterrupt:
        log("interrupted")
        sys.exit(EXIT_INTERRUPTED)
    except Diverged as error:
        log(f"error: {error}")
        sys.exit(EXIT_DIVERGED)
    except (OSError, RunFailed) as error:
        log(f"error: {error}")
        sys.exit(EXIT_FAILED)
    sys.exit(EXIT_DONE)


def log(line: str) -> None:
    """Progress and remarks: standard error, so that standard output holds results only. It may go to a file on a disk
    that is full, which is no reason to end. File names and values in it cannot act on a terminal, now or later."""
    with suppress(OSError):
        print(harmless(line), file=sys.stderr, flush=True)  # noqa: T201


def say(text: str) -> None:
    """Write text to standard output at once: as it is for a program, and so that it cannot act for a terminal."""
    sys.stdout.write(harmless(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def show(result: Mapping[str, object], *, as_json: bool) -> None:
    """The command's result on standard output."""
    if as_json:
        print(json.dumps(result))  # noqa: T201
        return
    width = max(len(key) for key in result)
    for key, value in result.items():
        say(f"{key.replace('_', ' '):<{width}}  {_text(value)}\n")


def show_table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """A table for people on standard output: names to the left, numbers to the right."""
    lines = [tuple(header), *(tuple(map(_text, row)) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    say("\n")
    for first, *others in lines:
        cells = (f"{cell:>{width}}" for cell, width in zip(others, widths[1:], strict=True))
        say("  ".join([f"{first:<{widths[0]}}", *cells]) + "\n")


def _text(value: object) -> str:
    if value is None or isinstance(value, bool):
        return {None: "unknown", True: "yes", False: "no"}[value]
    return f"{value:,}" if isinstance(value, int) else f"{value:.6g}" if isinstance(value, float) else str(value)
