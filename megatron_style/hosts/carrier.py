"""Make the environment of a launcher, so that ranks on other hosts get their variables and no other user sees them.

DeepSpeed writes the contents of DS_ENV_FILE into command lines, which every user of a host can read. So the file says
`NAME=$(cat PATH)`, and the values are sent over ssh, through standard input, to a holder on each host.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from megatron_style.hosts.forwarded_environment import LAUNCH, open_variables, own_variables
from megatron_style.hosts.holder import HELD, NAME
from megatron_style.hosts.hosts import Host, Unanswered, ask_all, in_this_folder

_SECONDS = 60.0  # for a host to take the variables
_END_SECONDS = 10.0
_THIS_HOST = "%n"  # pdsh puts the host's number in its list there, as in DeepSpeed's own --node_rank=%n


@contextmanager
def launch_environment(hosts: Sequence[Host], launch: str) -> Iterator[dict[str, str]]:
    """Yield the environment of a launcher that starts ranks on these hosts over ssh, or here if there are none. All its
    processes have the key of the launch in it."""
    own = own_variables()
    named = {LAUNCH: launch}
    with tempfile.NamedTemporaryFile("w", encoding="utf-8") as file, _held(hosts, own) as folder:
        lines = open_variables() | named | {name: f"$(cat {folder}/{name})" for name in own}
        file.write("".join(f"{name}={value}\n" for name, value in lines.items()))
        file.flush()
        yield os.environ | own | named | {"DS_ENV_FILE": file.name}


@contextmanager
def _held(hosts: Sequence[Host], variables: Mapping[str, str]) -> Iterator[str]:
    """Yield the folder in which every host finds the variables, as long as the context lasts."""
    folder = f"/tmp/{NAME}{uuid.uuid4().hex}-"  # made with mode 0700, and its name cannot be guessed
    numbers = {host: number for number, host in enumerate(hosts)}
    holders: Mapping[Host, subprocess.Popen[str]] = {}
    silent: Mapping[Host, Unanswered] = {}
    if variables:
        holders, silent = ask_all(hosts, lambda host: _start_holder(host, f"{folder}{numbers[host]}", variables))
    try:
        for host, error in silent.items():
            raise Unanswered(f"{host.name}: did not take the variables of .deepspeed_env: {error}")
        yield folder + _THIS_HOST
    finally:
        for holder in holders.values():
            _end(holder)


def _start_holder(host: Host, folder: str, variables: Mapping[str, str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "megatron_style.hosts.holder", folder]
    words = host.words(in_this_folder(command))
    pipe = subprocess.PIPE
    # In its own session, so that Ctrl-C does not end it before the launch.
    holder = subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe, text=True, start_new_session=True)
    assert holder.stdin
    assert holder.stdout
    timeout = threading.Timer(_SECONDS, holder.kill)
    timeout.start()
    with suppress(BrokenPipeError):  # it has ended, and says why on standard error
        holder.stdin.write(json.dumps(variables) + "\n")
        holder.stdin.flush()
    holds = any(line.strip() == HELD for line in holder.stdout)
    timeout.cancel()
    if not holds:
        holder.kill()
        error = holder.communicate()[1].strip() or f"no answer within {_SECONDS:.0f} s"
        raise Unanswered(error.splitlines()[-1])
    return holder


def _end(holder: subprocess.Popen[str]) -> None:
    """Close the standard input of a holder, which removes its files then."""
    try:
        holder.communicate(timeout=_END_SECONDS)
    except subprocess.TimeoutExpired:  # the host is gone
        holder.kill()
        holder.communicate()
