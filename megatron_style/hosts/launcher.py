"""Where this process finds itself: who started it, and on what it computes. Without DeepSpeed, which takes seconds."""

from __future__ import annotations

import os

import torch

from megatron_style.base.errors import UserError

DEFAULT_PORT = 29500  # DeepSpeed's and torchrun's own


def launcher() -> str:
    """By what it left in the environment."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return "torchrun"
    if "OMPI_COMM_WORLD_SIZE" in os.environ:
        return "mpirun"
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return "deepspeed"
    if int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1:  # a batch script has SLURM_PROCID too, but no such step
        return "srun"
    if "PMI_SIZE" in os.environ:  # after srun, which sets it as well
        return "mpirun"
    return "none"


def adopt_srun() -> None:
    """Say to torch in its own words what srun says: srun starts processes, and leaves the rest to them."""
    slurm = os.environ
    if "MASTER_ADDR" not in slurm and int(slurm["SLURM_STEP_NUM_NODES"]) > 1:
        raise UserError(
            "MASTER_ADDR is not set, and srun alone does not tell where the first process runs; "
            "launch/slurm.sbatch sets it to the job's first host"
        )
    os.environ |= {
        "RANK": slurm["SLURM_PROCID"],
        "LOCAL_RANK": slurm["SLURM_LOCALID"],
        "WORLD_SIZE": slurm["SLURM_STEP_NUM_TASKS"],
        "MASTER_ADDR": slurm.get("MASTER_ADDR", "127.0.0.1"),
        "MASTER_PORT": slurm.get("MASTER_PORT", str(_port_of_job(int(slurm["SLURM_JOB_ID"])))),
    }


def count_hosts(started_by: str) -> int:
    """After the grid was joined. Launchers say it themselves; mpirun's ranks ask one another."""
    if started_by == "mpirun":
        from mpi4py import MPI  # its import starts MPI, which only `mpirun` can serve

        return len(set(MPI.COMM_WORLD.allgather(MPI.Get_processor_name())))
    told = {"deepspeed": "CROSS_SIZE", "torchrun": "GROUP_WORLD_SIZE", "srun": "SLURM_STEP_NUM_NODES"}
    return int(os.environ.get(told.get(started_by, ""), "1"))


def accelerator() -> torch.device:
    """As DeepSpeed chooses: DS_ACCELERATOR=cpu leaves an accelerator alone."""
    found = torch.accelerator.current_accelerator(check_available=True)
    if os.environ.get("DS_ACCELERATOR") == "cpu" or found is None:
        return torch.device("cpu")
    return torch.device(found.type, int(os.environ.get("LOCAL_RANK", "0")))


def _port_of_job(job: int) -> int:
    """Two jobs on one host must not meet on one port. Below the range that Linux hands out by itself."""
    return 20000 + job % 10000
