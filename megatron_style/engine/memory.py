"""The most memory this process has used, on the accelerator or, without one, in host memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch


@contextmanager
def peak_memory(device: torch.device) -> Iterator[Callable[[], int]]:
    """Gives a function that tells the peak, in bytes, since the context was entered."""
    forget_peak(device)
    yield lambda: peak_bytes(device)


def forget_peak(device: torch.device) -> None:
    """From now on the peak is that of what follows."""
    if device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats(device)
        return
    with suppress(OSError):  # where it cannot be done, the peak is the one since the process began: never too low
        Path("/proc/self/clear_refs").write_text("5")  # Linux: sets the high-water mark back to what is used now


def peak_bytes(device: torch.device) -> int:
    return _resident_peak() if device.type == "cpu" else torch.accelerator.max_memory_allocated(device)


def is_out_of_memory(error: RuntimeError) -> bool:
    """CUDA has a class for it; the CPU allocator only has its words."""
    return "out of memory" in str(error) or "can't allocate memory" in str(error)


def _resident_peak() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0
