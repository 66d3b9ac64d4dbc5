"""Run commands in separate processes, alone or under a launcher."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = ROOT / "launch"
TAKE_A_HOSTFILE = {"multi_node.sh", "mpi.sh"}
SLURM = {
    "SLURM_SUBMIT_DIR": str(ROOT),
    "SLURM_JOB_NODELIST": "node[1-2]",
    "SLURM_JOB_ID": "7",
    "SLURM_NTASKS_PER_NODE": "1",
    "SLURM_PROCID": "0",
    "SLURM_NTASKS": "2",
}


def launch(command: str, *argv: object, processes: int | None = None) -> subprocess.CompletedProcess[str]:
    """Run `python -m megatron_style.COMMAND`, under the deepspeed launcher if a number of processes is given."""
    words: list[object] = [sys.executable]
    if processes is not None:
        deepspeed = Path(sys.executable).with_name("deepspeed")
        words = [deepspeed, "--num_accelerators", processes, "--master_port", free_port()]
    words += ["--module" if processes else "-m", f"megatron_style.{command}", *argv]
    texts = list(map(str, words))
    return subprocess.run(texts, cwd=ROOT, env=plain_environment(), capture_output=True, text=True, timeout=300)


def plain_environment(**more: object) -> dict[str, str]:
    """Return the environment of a process on CPUs that finds this project, and `python` where a launcher starts it."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    ours = {"PATH": path, "PYTHONPATH": ROOT, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": 1, **more}
    return os.environ | {name: str(value) for name, value in ours.items()}


def script_environment(**more: object) -> dict[str, str]:
    """Return the environment of a launch script. The Slurm stand-ins come last in PATH, after a real Slurm."""
    plain = plain_environment(OMPI_ALLOW_RUN_AS_ROOT=1, OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1, MASTER_PORT=free_port())
    plain["PATH"] += f":{ROOT / 'tests' / 'support' / 'slurm'}"
    return plain | {name: str(value) for name, value in more.items()}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
    return port
