"""The variables that the ranks on other hosts need and that ssh does not forward.

python -m megatron_style.hosts.forwarded_environment    (for the scripts in launch/: lines of NAME=value)
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from megatron_style.base.command import run_command
from megatron_style.base.errors import UserError

LAUNCH = "MEGATRON_STYLE_LAUNCH"  # names the launch in the environment of each of its processes
_NAMES = (
    "PATH",
    "PYTHONPATH",
    "TORCH_EXTENSIONS_DIR",
    "DS_ACCELERATOR",
    "OMP_NUM_THREADS",
    "MASTER_PORT",
    "GLOO_SOCKET_IFNAME",
    "NCCL_SOCKET_IFNAME",
)
_MLFLOW = "MLFLOW"  # DeepSpeed's launcher forwards every variable that begins like this, even passwords
_OWN_FILE = Path(".deepspeed_env")  # the user's, where DeepSpeed looks for it
_PROJECT = Path(__file__).parents[2]
_LINE = re.compile(r"(?P<name>[A-Za-z_][A-Za-z0-9_]*)\s*=\s*(?P<quote>[\"']?)(?P<value>.*?)(?P=quote)\s*")


def carried_variables() -> dict[str, str]:
    """Return all of them. The user's own file takes precedence."""
    return open_variables() | own_variables()


def open_variables() -> dict[str, str]:
    """Return the variables that a launcher itself needs; none of them is a secret."""
    return {name: os.environ[name] for name in _NAMES if os.environ.get(name)}


def own_variables() -> dict[str, str]:
    """Return the variables that the user adds. They may be secrets, which belong in no command line and no log."""
    variables = {name: value for name, value in os.environ.items() if name.startswith(_MLFLOW)}
    file = _OWN_FILE if _OWN_FILE.is_file() else _PROJECT / _OWN_FILE
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = _LINE.fullmatch(line.strip())
        if match is None:
            raise UserError(f"{file}, line {number}: not a variable; expected NAME=value")
        variables[match["name"]] = match["value"]
    return variables


def main() -> None:
    for name, value in carried_variables().items():
        sys.stdout.write(f"{name}={value}\n")


if __name__ == "__main__":
    run_command(main)
