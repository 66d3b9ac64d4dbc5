"""Find out what started this process, and its device. DeepSpeed is not imported, because that takes seconds."""

from __future__ import annotations

import os
import socket
import subprocess
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from megatron_style.base.errors import UserError
from megatron_style.base.launchers import (
    DEEPSPEED,
    MPICH,
    OPEN_MPI,
    SRUN,
    STARTED_HERE,
    TORCHRUN,
    PlaceVariables,
)

DEFAULT_PORT = 29500  # DeepSpeed's and torchrun's own
_ADDRESS_BYTES = 64  # longer than any IPv6 address


def _adopt_nothing(_port: int) -> None:
    """Do nothing: the launcher has set torch's own variables, or there is none."""


def adopt_srun(_port: int) -> None:
    """Set torch's variables from those of srun, which starts processes and does no more."""
    slurm = os.environ
    if "MASTER_ADDR" not in slurm and int(slurm[SRUN.hosts]) > 1:
        raise UserError(
            "MASTER_ADDR is not set, and srun does not say where the first process runs; "
            "launch/slurm.sbatch sets it to the job's first host"
        )
    os.environ |= {
        "RANK": slurm[SRUN.rank],
        "LOCAL_RANK": slurm[SRUN.local_rank],
        "WORLD_SIZE": slurm[SRUN.world],
        "MASTER_ADDR": slurm.get("MASTER_ADDR", "127.0.0.1"),
        "MASTER_PORT": slurm.get("MASTER_PORT", str(_port_of_job(int(slurm["SLURM_JOB_ID"])))),
    }


def adopt_mpirun(port: int) -> None:
    """Set torch's variables from MPI. Only buffers are exchanged, because mpi4py pickles everything else."""
    from mpi4py import MPI  # its import initializes MPI, which needs `mpirun`

    world = MPI.COMM_WORLD
    here = world.Split_type(MPI.COMM_TYPE_SHARED)
    hosts = array("i", [here.Get_rank() == 0])
    world.Allreduce(MPI.IN_PLACE, hosts)
    address = bytearray(_first_address().encode().ljust(_ADDRESS_BYTES))
    world.Bcast(address, root=0)
    os.environ[OPEN_MPI.hosts] = str(hosts[0])
    if "LOCAL_RANK" not in os.environ:
        os.environ |= {
            "RANK": str(world.Get_rank()),
            "LOCAL_RANK": str(here.Get_rank()),
            "WORLD_SIZE": str(world.Get_size()),
            "MASTER_ADDR": address.decode().strip(),
            "MASTER_PORT": str(port),
        }
    here.Free()


@dataclass(frozen=True)
class Launcher:
    """A way to start ranks. `adopt` sets the variables that torch needs; the port is for launchers that set none."""

    name: str
    place: PlaceVariables | None  # None: a single process without a rank
    detect: Callable[[Mapping[str, str]], bool]
    adopt: Callable[[int], None]

    def count_hosts(self) -> int | None:
        """Return the number of hosts, or None if the launcher does not set it: then there may be several."""
        if self.place is None:
            return 1
        hosts = os.environ.get(self.place.hosts)
        return int(hosts) if hosts else None


NO_LAUNCHER = Launcher("none", None, lambda _: True, _adopt_nothing)
# The first match counts: launchers run inside one another, and each leaves its variables. The batch script of a Slurm
# job has SLURM_PROCID too, but no step of several tasks; srun also sets PMI_SIZE, so MPICH comes after it.
LAUNCHERS = (
    Launcher("torchrun", TORCHRUN, lambda variables: "TORCHELASTIC_RUN_ID" in variables, _adopt_nothing),
    Launcher("mpirun", OPEN_MPI, lambda variables: OPEN_MPI.world in variables, adopt_mpirun),
    Launcher("local", DEEPSPEED, lambda variables: STARTED_HERE in variables, _adopt_nothing),
    Launcher("deepspeed", DEEPSPEED, lambda variables: variables.keys() >= {"RANK", "WORLD_SIZE"}, _adopt_nothing),
    Launcher("srun", SRUN, lambda variables: int(variables.get(SRUN.world, "1")) > 1, adopt_srun),
    Launcher("mpirun", MPICH, lambda variables: MPICH.world in variables, adopt_mpirun),
    NO_LAUNCHER,
)


def find_launcher() -> Launcher:
    """Return the launcher of this process, detected by its environment variables."""
    return next(launcher for launcher in LAUNCHERS if launcher.detect(os.environ))


def accelerator() -> torch.device:
    """Return the device that DeepSpeed would choose: with DS_ACCELERATOR=cpu an accelerator is not used."""
    found = torch.accelerator.current_accelerator(check_available=True)
    if os.environ.get("DS_ACCELERATOR") == "cpu" or found is None:
        return torch.device("cpu")
    return torch.device(found.type, int(os.environ.get("LOCAL_RANK", "0")))


def _first_address() -> str:
    """Return this host's first address, as DeepSpeed's launcher finds it."""
    addresses = subprocess.run(["hostname", "-I"], capture_output=True, text=True).stdout.split()
    return addresses[0] if addresses else socket.gethostbyname(socket.gethostname())


def _port_of_job(job: int) -> int:
    """Return a port of the job's own, so that two jobs can share a host. It is below Linux's ephemeral range."""
    return 20000 + job % 10000
