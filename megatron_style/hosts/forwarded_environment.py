"""The variables that the ranks on other hosts need and that ssh does not carry over.

python -m megatron_style.hosts.forwarded_environment    (for the scripts in launch/)
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

LAUNCH = "MEGATRON_STYLE_LAUNCH"  # names the launch in the environment of each of its processes
_NAMES = (
    "PATH",
    "TORCH_EXTENSIONS_DIR",
    "DS_ACCELERATOR",
    "OMP_NUM_THREADS",
    "MASTER_PORT",
    "GLOO_SOCKET_IFNAME",
    "NCCL_SOCKET_IFNAME",
)
_OWN_FILE = Path(".deepspeed_env")  # the user's, where DeepSpeed looks for it


def carried_variables() -> list[str]:
    """As NAME=value: those that are set."""
    return [f"{name}={os.environ[name]}" for name in _NAMES if os.environ.get(name)]


def environment_file(launch: str = "") -> str:
    """Return NAME=value lines. The deepspeed launcher sets on every host what the file DS_ENV_FILE names, and nothing
    else. The user's own file comes last, so it has the last word."""
    own = _OWN_FILE.read_text(encoding="utf-8") if _OWN_FILE.is_file() else ""
    named = f"{LAUNCH}={launch}\n" if launch else ""
    return named + "".join(f"{line}\n" for line in carried_variables()) + own


if __name__ == "__main__":
    sys.stdout.write(environment_file())
