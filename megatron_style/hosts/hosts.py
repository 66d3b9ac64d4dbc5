"""The hosts of a launch, and how to ask them: over ssh, in parallel, always with a timeout."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from megatron_style.base.errors import RunFailed, UserError
from megatron_style.hosts.forwarded_environment import carried_variables

_NAME = r"[A-Za-z0-9_\[][A-Za-z0-9_.:@%\]-]*"  # nothing that ssh or a shell would interpret
_LINE = re.compile(rf"(?P<name>{_NAME})\s+slots=(?P<slots>[1-9][0-9]{{0,5}})")
_SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=5", "--")

Result = TypeVar("Result")


class Unanswered(RunFailed):
    """A host did not answer; the message is the last line it printed."""


@dataclass(frozen=True)
class Host:
    name: str
    slots: int | None = None  # None: as many as it has devices
    over_ssh: bool = True

    def ask(self, question: str, *, limit: float = 60, **details: object) -> dict[str, Any]:
        """Return the answer of `hosts/probe.py` there. The other side has a timeout too, so that no process is left."""
        probe = [sys.executable, "-m", "megatron_style.hosts.probe", question, json.dumps(details)]
        words = ["timeout", "-k", "2", str(limit), *probe]
        output = self.run(in_this_folder(words), limit + 10, stdin=json.dumps(carried_variables()))
        try:
            answer: dict[str, Any] = json.loads(output.splitlines()[-1])
        except (IndexError, ValueError):
            raise Unanswered(f"the answer is not JSON: {output[-200:]!r}") from None
        return answer

    def clock_offset(self) -> float:
        """Return how many seconds its clock is ahead of this machine's, to within half of the round trip."""
        begin = time.time()
        remote = float(self.run("date +%s.%N", 15))
        return remote - (begin + time.time()) / 2

    def words(self, command: str) -> list[str]:
        """Return the command line that runs a command there."""
        return [*_SSH, self.name, command] if self.over_ssh else ["sh", "-c", command]

    def run(self, command: str, seconds: float, *, stdin: str = "") -> str:
        """Run a command there and return its output. Standard input may hold secrets: no other user sees it."""
        words = self.words(command)
        try:
            done = subprocess.run(words, input=stdin, capture_output=True, text=True, timeout=seconds)
        except subprocess.TimeoutExpired:
            raise Unanswered(f"no answer within {seconds:.0f} s") from None
        except FileNotFoundError:
            raise Unanswered(f"{words[0]} is not installed on this machine") from None
        if done.returncode == 124:
            raise Unanswered("the command took too long and was ended")
        if done.returncode:
            last = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
            raise Unanswered(last)
        return done.stdout


def in_this_folder(words: Sequence[str]) -> str:
    """Return the shell command that runs these words in the current folder of another host, where Python finds the
    same modules as here."""
    modules = os.environ.get("PYTHONPATH")
    variables = ["env", f"PYTHONPATH={modules}"] if modules else []
    return f"cd {shlex.quote(str(Path.cwd()))} && exec {shlex.join([*variables, *words])}"


def this_machine() -> Host:
    return Host("localhost", over_ssh=False)


def read_hostfile(path: Path) -> tuple[Host, ...]:
    """Read lines of `NAME slots=N`, in the order of their ranks, as DeepSpeed and Open MPI do."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read as a hostfile: {error}") from None
    hosts: dict[str, Host] = {}
    for number, line in enumerate(lines, start=1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        match = _LINE.fullmatch(text)
        if match is None:
            raise UserError(f"{path}, line {number}: {text!r}; expected a host and its slots, such as `node1 slots=8`")
        if match["name"] in hosts:
            raise UserError(f"{path}, line {number}: duplicate host {match['name']}; add its slots up in one line")
        hosts[match["name"]] = Host(match["name"], int(match["slots"]))
    if not hosts:
        raise UserError(f"{path}: names no host; expected lines such as `node1 slots=8`")
    return tuple(hosts.values())


def ask_all(
    hosts: Sequence[Host], ask: Callable[[Host], Result]
) -> tuple[Mapping[Host, Result], Mapping[Host, Unanswered]]:
    """Ask all hosts in parallel. Return the answers, and the errors of the hosts that gave none."""
    answers: dict[Host, Result] = {}
    silent: dict[Host, Unanswered] = {}
    with ThreadPoolExecutor(max_workers=max(1, len(hosts))) as threads:
        futures = {host: threads.submit(ask, host) for host in hosts}
        for host, future in futures.items():
            try:
                answers[host] = future.result()
            except Unanswered as error:
                silent[host] = error
    return answers, silent
