"""The time that this rank spends in each phase of its steps."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch.profiler import record_function

Phase = Literal["data", "forward", "backward", "update"]
PHASES: tuple[Phase, ...] = ("data", "forward", "backward", "update")
_ON_HOST: frozenset[Phase] = frozenset({"data"})  # on any device


class PhaseTimes:
    """Adds up the seconds of each phase. The device has its own clock, so that measuring does not wait for it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._measured: deque[tuple[Phase, torch.Event, torch.Event]] = deque()

    @contextmanager
    def measure(self, phase: Phase) -> Iterator[None]:
        """Measure what is done inside. A profiler shows it under the phase's name."""
        with record_function(phase), self._clock(phase):
            yield

    @contextmanager
    def _clock(self, phase: Phase) -> Iterator[None]:
        if self._device.type == "cpu" or phase in _ON_HOST:
            began = time.perf_counter()
            yield
            self._seconds[phase] += time.perf_counter() - began
            return
        begin = self._mark()
        yield
        self._measured.append((phase, begin, self._mark()))
        self._add_finished()

    def take(self) -> list[float]:
        """Return the seconds of all phases since the last call, in the order of `PHASES`. What the device has not
        finished counts at the next call."""
        self._add_finished()
        seconds = list(self._seconds.values())
        self._seconds = dict.fromkeys(PHASES, 0.0)
        return seconds

    def _mark(self) -> torch.Event:
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event

    def _add_finished(self) -> None:
        while self._measured and self._measured[0][2].query():
            phase, begin, end = self._measured.popleft()
            self._seconds[phase] += begin.elapsed_time(end) / 1000
