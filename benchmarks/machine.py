"""Where and with what a benchmark was measured: every file of results has it."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from megatron_style.base.cpu import bf16_instructions, cpu_name

ROOT = Path(__file__).parents[1]


def machine() -> dict[str, Any]:
    """Return commit, machine, CPU features and versions."""
    return {
        "commit": _git("rev-parse", "--short", "HEAD"),
        "changed": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "vector_instructions": torch.backends.cpu.get_cpu_capability(),
        "bf16_instructions": bf16_instructions(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("torch", "deepspeed", "numpy")},
    }


def _git(*words: str) -> str | None:
    """Return what git says, or None without git or a repository."""
    try:
        done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None
