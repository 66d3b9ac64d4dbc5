"""Join and leave the process grid, under any launcher or none."""

from __future__ import annotations

import gc
import logging
import os
import socket
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import deepspeed
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from megatron_style.base.command import log
from megatron_style.base.errors import UserError
from megatron_style.hosts.launcher import DEFAULT_PORT, NO_LAUNCHER, find_launcher
from megatron_style.parallel.topology import Topology

_LOOPBACK = "lo"
_ADDRESS = "127.0.0.1"


@contextmanager
def distributed_session(*, tensor: int) -> Iterator[Topology]:
    gc.freeze()  # DeepSpeed collects garbage at every start; it need not visit what is imported, which takes seconds
    deepspeed.utils.logger.setLevel("WARNING")
    for handler in deepspeed.utils.logger.handlers:
        if type(handler) is logging.StreamHandler:  # DeepSpeed's own, not an instance of a subclass added by others
            handler.setStream(sys.stderr)  # standard output is for results
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")  # of DeepSpeed's own calls
    # DeepSpeed's shared-memory collectives ignore process groups, need a compiler and leak shared memory. Nothing else
    # reads this table, which DeepSpeed would fill by running compilers.
    deepspeed.ops.__compatible_ops__ = {"deepspeed_shm_comm": False}
    joined_here = not dist.is_initialized()
    if joined_here:
        _join()
    else:
        take_device(int(os.environ.get("LOCAL_RANK", "0")))
        deepspeed.init_distributed(get_accelerator().communication_backend_name(), verbose=False)
    try:
        yield Topology.of_world(tensor=tensor)
        dist.barrier()  # no rank leaves while another still needs it
    finally:
        if joined_here:
            dist.destroy_process_group()


def _join() -> None:
    """Join the process group, and log launcher, processes and hosts, so that a wrong launch is noticed at once."""
    launcher = find_launcher()
    port = int(os.environ.get("MASTER_PORT", DEFAULT_PORT))  # under mpirun nothing else would name it
    launcher.adopt(port)
    os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed's engine needs it even without a launcher
    backend = get_accelerator().communication_backend_name()
    take_device(int(os.environ["LOCAL_RANK"]))
    hosts = launcher.count_hosts()
    if launcher is NO_LAUNCHER:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    rendezvous = _listen_on_loopback() if launcher is not NO_LAUNCHER and hosts == 1 else None
    deepspeed.init_distributed(backend, distributed_port=port, verbose=False)
    del rendezvous  # the process group holds it from here on
    if dist.get_rank() == 0:
        log(f"launcher: {launcher.name}; processes: {dist.get_world_size()}; hosts: {hosts or 'unknown'}")


def _listen_on_loopback() -> object | None:
    """Make the rendezvous of a single host. torch's own would listen on all interfaces and let anyone write; in the
    process that holds this one, torch finds it by its port and makes none."""
    if _LOOPBACK in [name for _, name in socket.if_nameindex()]:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", _LOOPBACK)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # torchrun's own process has the port
        return None
    os.environ["MASTER_ADDR"] = _ADDRESS
    if os.environ["RANK"] != "0":
        return None
    port = int(os.environ["MASTER_PORT"])
    listening = socket.create_server((_ADDRESS, port)).detach()  # the store closes it
    store = dist.TCPStore  # type: ignore[attr-defined]
    return store(_ADDRESS, port, is_master=True, multi_tenant=True, master_listen_fd=listening)


def take_device(local_rank: int) -> None:
    """Make this rank's device the current one. JSON collectives and barriers use the current device, which by default
    is the host's first, while NCCL is bound to that of LOCAL_RANK."""
    accelerator = get_accelerator()
    kind = accelerator.device_name()
    if kind == "cpu":
        return
    visible = accelerator.device_count()
    if local_rank >= visible:
        raise UserError(
            f"LOCAL_RANK is {local_rank}, but this process sees {visible} {kind} device(s); start at most one process "
            f"per device, and let each process see all devices of its host"
        )
    accelerator.set_device(local_rank)
