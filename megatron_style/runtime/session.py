"""Join and leave the process grid, under any launcher or none."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from megatron_style.config.command import log
from megatron_style.parallel.topology import Topology
from megatron_style.runtime.launcher import DEFAULT_PORT, adopt_srun, count_hosts, launcher


@contextmanager
def distributed_session(*, tensor: int) -> Iterator[Topology]:
    deepspeed.utils.logger.setLevel("WARNING")
    for handler in deepspeed.utils.logger.handlers:
        if isinstance(handler, logging.StreamHandler):
            handler.setStream(sys.stderr)  # standard output is for results
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")  # of DeepSpeed's own calls
    # DeepSpeed's shared-memory collectives ignore process groups, need a compiler and leak shared memory.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    joined_here = not dist.is_initialized()
    if joined_here:
        _join()
    else:
        deepspeed.init_distributed(get_accelerator().communication_backend_name(), verbose=False)
    try:
        yield Topology.of_world(tensor=tensor)
        dist.barrier()  # nobody leaves while another rank still needs it
    finally:
        if joined_here:
            dist.destroy_process_group()


def _join() -> None:
    """One line tells the first rank's reader what was found, before a run on half of the machine has cost a night."""
    started_by = launcher()
    if started_by == "none":
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
        os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed's engine asks for it
    if started_by == "srun":
        adopt_srun()
    deepspeed.init_distributed(
        get_accelerator().communication_backend_name(),
        distributed_port=int(os.environ.get("MASTER_PORT", DEFAULT_PORT)),  # under mpirun nothing else would name it
        verbose=False,
    )
    hosts, processes = count_hosts(started_by), dist.get_world_size()
    if dist.get_rank() == 0:
        log(f"launcher: {started_by}; processes: {processes}; hosts: {hosts}")


def device() -> torch.device:
    return torch.device(get_accelerator().current_device_name())
