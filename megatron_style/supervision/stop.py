"""Stop a run early, on a signal or after output.stop_after. It saves first, and all ranks leave together."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from megatron_style.supervision.signals import StopSignals

_NOT_YET, _SIGNALLED, _OUT_OF_TIME = range(3)
_REASONS = (None, "a signal asked for it", "output.stop_after is over")


class StopRequest:
    """A request to stop on which all ranks agree. They exchange it while the next step computes, so that no step waits
    for it, and leave one step later."""

    def __init__(self, signals: StopSignals, *, after_seconds: float | None, device: torch.device) -> None:
        self._signals = signals
        self._asked = _NOT_YET
        self._deadline = None if after_seconds is None else time.monotonic() + after_seconds
        self._verdict = torch.zeros((), dtype=torch.int32, device=device)
        self._on_host = torch.zeros((), dtype=torch.int32, pin_memory=device.type != "cpu")
        self._copied = None if device.type == "cpu" else torch.Event(device)

    def agreed(self) -> str | None:
        """Return why to stop after this step, the same on every rank; None to continue. Call it once per step."""
        if self._copied is not None:
            self._copied.synchronize()  # it was recorded a step ago
        found = _REASONS[int(self._on_host.numpy())]
        if self._deadline is not None and time.monotonic() > self._deadline:
            self._asked = max(self._asked, _OUT_OF_TIME)
        if self._signals.asked:
            self._asked = max(self._asked, _SIGNALLED)
        self._verdict.fill_(self._asked)
        dist.all_reduce(self._verdict, op=dist.ReduceOp.MAX)
        self._on_host.copy_(self._verdict, non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        return found
