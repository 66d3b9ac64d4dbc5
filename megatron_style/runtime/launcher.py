"""Where this process finds itself: who started it, and on what it computes. Without DeepSpeed, which takes seconds."""

from __future__ import annotations

import os

import torch


def launcher() -> str:
    """By what it left in the environment."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return "torchrun"
    if "OMPI_COMM_WORLD_SIZE" in os.environ or "PMI_SIZE" in os.environ:
        return "mpirun"
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return "deepspeed"
    return "none"


def accelerator() -> torch.device:
    """As DeepSpeed chooses: DS_ACCELERATOR=cpu leaves an accelerator alone."""
    found = torch.accelerator.current_accelerator(check_available=True)
    if os.environ.get("DS_ACCELERATOR") == "cpu" or found is None:
        return torch.device("cpu")
    return torch.device(found.type, int(os.environ.get("LOCAL_RANK", "0")))
