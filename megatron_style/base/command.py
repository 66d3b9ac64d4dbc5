"""What all commands share: flags, exit codes, results on standard output and logs on standard error."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar

from megatron_style.base import leave_at_ctrl_c, raise_at_ctrl_c
from megatron_style.base.errors import Diverged, OnlyChecked, RunFailed, Stopped, UserError, harmless
from megatron_style.base.launchers import is_first_of_host

CONSOLE_COMMAND = "shortformer"
LAST_WORDS = "MEGATRON_STYLE_LAST_WORDS"  # names a folder of this host in the environment of a launch
_TORCHRUN_SUMMARY = "TORCHELASTIC_ERROR_FILE"  # names a file whose message torchrun repeats at its end
Value = TypeVar("Value")
Level = Literal["FAIL", "WARN", "ok"]  # of a finding
_LEVELS: tuple[Level, ...] = ("FAIL", "WARN", "ok")
EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_STOPPED = 75
EXIT_DIVERGED = 76
EXIT_INTERRUPTED = 130
_BYTES = {"KB": 10**3, "MB": 10**6, "GB": 10**9}


class _OneLineParser(argparse.ArgumentParser):
    """A parser that reports a wrong flag like any other wrong input: in one line."""

    def error(self, message: str) -> NoReturn:
        log(f"error: {message.removeprefix('argument ')}; `{self.prog} --help` lists the flags")
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


def byte_size(text: str) -> int:
    """Read the value of a flag that is a size, such as 500MB or 5GB, in powers of ten as disks count."""
    found = re.fullmatch(r"([1-9][0-9]*)(KB|MB|GB)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 500MB or 5GB")
    return int(found[1]) * _BYTES[found[2]]


def output_file(text: str) -> Path:
    """Read the value of a flag that names a file to write."""
    path = Path(text)
    if not path.parent.is_dir() or path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} must be a file in a folder that exists")
    return path


def argument_type(convert: Callable[[str], Value]) -> Callable[[str], Value]:
    """Return the `type` of an argument whose error message is shown unchanged. A UserError is a ValueError, whose
    message argparse would replace by its own."""

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
        metavar="section.key=value", help="override a value of the run file; may be repeated",
    )  # fmt: skip


def run_module(name: str) -> NoReturn:
    """Import a module, run its main as a command, and exit."""
    run_command(lambda: _imported(name).main())


def _imported(name: str) -> Any:
    """Import a module. Ctrl-C meanwhile ends the process at once: an exception within an import may get lost."""
    leave_at_ctrl_c()
    module = import_module(name)
    raise_at_ctrl_c()
    return module


def run_command(main: Callable[[], None]) -> NoReturn:
    """Run a command's main and exit with the code of its outcome."""
    try:
        main()
    except UserError as error:
        if is_first_of_host():  # all processes of a host find the same mistake
            log(f"error: {error}")
        _keep_words(f"error: {error}", EXIT_BAD_INPUT)  # each: a launcher ends the first one when another is faster
        sys.exit(EXIT_BAD_INPUT)
    except OnlyChecked as note:
        if is_first_of_host():
            log(str(note))
    except Stopped as reason:
        if os.environ.get("RANK", "0") == "0":
            log(str(reason))
        sys.exit(EXIT_STOPPED)
    except KeyboardInterrupt:
        log("interrupted")
        sys.exit(EXIT_INTERRUPTED)
    except Diverged as error:
        last_words(f"error: {error}", EXIT_DIVERGED)
        sys.exit(EXIT_DIVERGED)
    except (OSError, RunFailed) as error:
        last_words(f"error: {error}", EXIT_FAILED)
        sys.exit(EXIT_FAILED)
    sys.exit(EXIT_DONE)


def last_words(line: str, code: int) -> None:
    """Log the error with which this process ends, and keep it for whoever started the process."""
    log(line)
    _keep_words(line, code)


def _keep_words(line: str, code: int) -> None:
    """Leave an error, under the name of the exit code, where the launch that started this process can repeat both: most
    launchers write lines of their own after it, and some exit with another code."""
    _tell_torchrun(line)
    folder = os.environ.get(LAST_WORDS)
    with suppress(OSError):  # on other hosts there is no such folder
        if folder:
            (Path(folder) / str(code)).write_text(line, encoding="utf-8")


def _tell_torchrun(line: str) -> None:
    """Leave an error where torchrun, started without a launch script, looks for what its summary says of a process."""
    file = os.environ.get(_TORCHRUN_SUMMARY)
    with suppress(OSError):
        if file:
            report = {"message": harmless(line), "timestamp": int(time.time())}
            Path(file).write_text(json.dumps(report), encoding="utf-8")


def log(line: str) -> None:
    """Write a line to standard error: standard output holds results only. A full disk is no reason to end, and control
    characters are escaped, since file names and values must not act on a terminal."""
    with suppress(OSError):
        print(harmless(line), file=sys.stderr, flush=True)  # noqa: T201


def say(text: str) -> None:
    """Write text to standard output and flush it. On a terminal control characters are escaped."""
    sys.stdout.write(harmless(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def show(result: Mapping[str, object], *, as_json: bool) -> None:
    """Print the command's result on standard output."""
    if as_json:
        print(json.dumps(result))  # noqa: T201
        return
    width = max(len(key) for key in result)
    for key, value in result.items():
        say(f"{key.replace('_', ' '):<{width}}  {_text(value)}\n")


def show_table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table on standard output: names aligned left, numbers right."""
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


@dataclass(frozen=True)
class Finding:
    """A result of a check before a launch."""

    level: Level
    subject: str  # a host, or what was checked
    message: str


def worst_first(findings: Iterable[Finding]) -> list[Finding]:
    return sorted(findings, key=lambda finding: _LEVELS.index(finding.level))
