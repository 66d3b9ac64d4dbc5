"""The peak memory of this process, on the accelerator or, without one, on the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch


@contextmanager
def peak_memory(device: torch.device) -> Iterator[Callable[[], int]]:
    """Yield a function that returns the peak, in bytes, since the context was entered."""
    forget_peak(device)
    yield lambda: peak_bytes(device)


def forget_peak(device: torch.device) -> None:
    """Reset the peak to what is used now."""
    if device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats(device)
        return
    with suppress(OSError):  # if it cannot be reset, the peak is that since the process began: never too low
        Path("/proc/self/clear_refs").write_text("5")  # Linux: resets the high-water mark


def peak_bytes(device: torch.device) -> int:
    return _resident_peak() if device.type == "cpu" else torch.accelerator.max_memory_allocated(device)


def is_out_of_memory(error: RuntimeError) -> bool:
    """True if an allocation failed. CUDA has an exception class for it; the CPU allocator has only a message."""
    return "out of memory" in str(error) or "can't allocate memory" in str(error)


def _resident_peak() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0
