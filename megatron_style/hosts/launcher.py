"""Where this process finds itself: who started it, and on what it computes. Without DeepSpeed, which takes seconds."""

from __future__ import annotations

import os
import socket
import subprocess
from array import array

import torch

from megatron_style.base.errors import UserError

DEFAULT_PORT = 29500  # DeepSpeed's and torchrun's own
_HOSTS = {
    "deepspeed": "CROSS_SIZE",
    "mpirun": "CROSS_SIZE",
    "torchrun": "GROUP_WORLD_SIZE",
    "srun": "SLURM_STEP_NUM_NODES",
}
_ADDRESS_BYTES = 64  # longer than any address of IPv6


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


def adopt_mpirun(port: int) -> None:
    """Say to torch in its own words what MPI knows. Only buffers are exchanged: mpi4py pickles everything else."""
    from mpi4py import MPI  # its import starts MPI, which only `mpirun` can serve

    world = MPI.COMM_WORLD
    here = world.Split_type(MPI.COMM_TYPE_SHARED)
    hosts = array("i", [here.Get_rank() == 0])
    world.Allreduce(MPI.IN_PLACE, hosts)
    address = bytearray(_first_address().encode().ljust(_ADDRESS_BYTES))
    world.Bcast(address, root=0)
    os.environ[_HOSTS["mpirun"]] = str(hosts[0])
    if "LOCAL_RANK" not in os.environ:
        os.environ |= {
            "RANK": str(world.Get_rank()),
            "LOCAL_RANK": str(here.Get_rank()),
            "WORLD_SIZE": str(world.Get_size()),
            "MASTER_ADDR": address.decode().strip(),
            "MASTER_PORT": str(port),
        }
    here.Free()


def count_hosts(started_by: str) -> int | None:
    """Return what the launcher says, or None if it says nothing: then there may be several."""
    if started_by == "none":
        return 1
    told = os.environ.get(_HOSTS[started_by])
    return int(told) if told else None


def accelerator() -> torch.device:
    """As DeepSpeed chooses: DS_ACCELERATOR=cpu leaves an accelerator alone."""
    found = torch.accelerator.current_accelerator(check_available=True)
    if os.environ.get("DS_ACCELERATOR") == "cpu" or found is None:
        return torch.device("cpu")
    return torch.device(found.type, int(os.environ.get("LOCAL_RANK", "0")))


def _first_address() -> str:
    """Return this host's first address, as DeepSpeed's launcher finds it."""
    told = subprocess.run(["hostname", "-I"], capture_output=True, text=True).stdout.split()
    return told[0] if told else socket.gethostbyname(socket.gethostname())


def _port_of_job(job: int) -> int:
    """Two jobs on one host must not meet on one port. Below the range that Linux hands out by itself."""
    return 20000 + job % 10000
