"""Ranks on this machine, without a launcher: forked processes that communicate through a file and gloo."""

from __future__ import annotations

import os
import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes


def run_ranks(world: int, body: Callable[..., Any], *args: object) -> list[Any]:
    """Return the results of `body(*args)` on all ranks. An exception on any rank is raised here."""
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        start_processes(_rank, (world, folder, body, args), nprocs=world, start_method="fork")
        # Safe to unpickle: written by our own children, into a folder of our own.
        return [pickle.loads((folder / f"result{rank}").read_bytes()) for rank in range(world)]


def _rank(rank: int, world: int, folder: Path, body: Callable[..., Any], args: tuple[object, ...]) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}  # DeepSpeed reads these
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=world)
    try:
        result = body(*args)
        (folder / f"result{rank}").write_bytes(pickle.dumps(result))
        dist.barrier()
    finally:
        dist.destroy_process_group()
