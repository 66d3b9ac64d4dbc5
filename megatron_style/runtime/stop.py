"""When a run has to leave early: a signal, or the end of its time. It saves first, and all ranks leave together."""

from __future__ import annotations

import signal
import time
from types import FrameType

import torch
import torch.distributed as dist

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)  # what schedulers send before they kill
_NOT_YET, _SIGNALLED, _OUT_OF_TIME = range(3)


class StopRequest:
    def __init__(self, *, after_seconds: float | None, device: torch.device) -> None:
        self._verdict, self._device = _NOT_YET, device
        self._deadline = None if after_seconds is None else time.monotonic() + after_seconds
        for number in _SIGNALS:
            signal.signal(number, self._on_signal)

    def agreed(self) -> str | None:
        """Why to stop after this step, the same on every rank; None to go on."""
        if self._deadline is not None and time.monotonic() > self._deadline:
            self._verdict = max(self._verdict, _OUT_OF_TIME)
        verdict = torch.tensor(self._verdict, device=self._device)
        dist.all_reduce(verdict, op=dist.ReduceOp.MAX)
        return (None, "a signal asked for it", "output.stop_after is over")[int(verdict)]

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self._verdict = max(self._verdict, _SIGNALLED)
