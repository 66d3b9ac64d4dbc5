"""The environment variables in which each launcher passes a process its rank; `hosts/launcher.py` detects which one
started this process.
"""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class PlaceVariables:
    rank: str
    local_rank: str
    world: str
    hosts: str


DEEPSPEED = PlaceVariables("RANK", "LOCAL_RANK", "WORLD_SIZE", "CROSS_SIZE")
STARTED_HERE = "MEGATRON_STYLE_STARTED_HERE"  # set by our own launcher, whose variables are those of DeepSpeed's
TORCHRUN = PlaceVariables("RANK", "LOCAL_RANK", "WORLD_SIZE", "GROUP_WORLD_SIZE")
OPEN_MPI = PlaceVariables(
    "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE", hosts="CROSS_SIZE"
)
SRUN = PlaceVariables("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_NODES")
MPICH = PlaceVariables("PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE", hosts="CROSS_SIZE")


def is_first_of_host() -> bool:
    """True if this process has local rank 0, or no launcher started it."""
    names = [place.local_rank for place in (DEEPSPEED, TORCHRUN, OPEN_MPI, SRUN, MPICH)]
    return next((os.environ[name] for name in names if name in os.environ), "0") == "0"


def mpi_world_size() -> int:
    """Return the number of MPI processes by the launcher's variables: importing mpi4py outside `mpirun` would start
    MPI."""
    return int(os.environ.get(OPEN_MPI.world) or os.environ.get(MPICH.world) or 1)
