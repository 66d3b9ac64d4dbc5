"""Ask all ranks to save, or to save and stop: on a signal, after output.stop_after, or every output.save_every."""

from __future__ import annotations

import time
from typing import NamedTuple

import torch
import torch.distributed as dist

from megatron_style.config.run import OutputConfig
from megatron_style.supervision.signals import StopSignals

_NOTHING, _SAVE, _SIGNALLED, _OUT_OF_TIME = range(4)  # the highest that any rank asks for is agreed on
_REASONS = (None, None, "a signal asked for it", "output.stop_after is over")


class Asked(NamedTuple):
    """What all ranks have agreed to do after a step. Who stops saves first."""

    stop: str | None  # the reason
    save: bool


class StopRequest:
    """A request on which all ranks agree. They exchange it while the next step computes, so that no step waits for it,
    and follow it one step later."""

    def __init__(self, signals: StopSignals, output: OutputConfig, device: torch.device) -> None:
        self._signals = signals
        self._asked = _NOTHING
        self._deadline = None if output.stop_seconds is None else time.monotonic() + output.stop_seconds
        self._save_seconds = output.save_seconds if dist.get_rank() == 0 else None  # one clock decides
        self._saved_at = time.monotonic()
        self._has_just_saved = False
        self._verdict = torch.zeros((), dtype=torch.int32, device=device)
        self._on_host = torch.zeros((), dtype=torch.int32, pin_memory=device.type != "cpu")
        self._copied = None if device.type == "cpu" else torch.Event(device)

    def agreed(self) -> Asked:
        """Return what to do after this step, the same on every rank. Call it once per step."""
        if self._copied is not None:
            self._copied.synchronize()  # it was recorded a step ago
        found = int(self._on_host.numpy())
        saves = found > _SAVE or (found == _SAVE and not self._has_just_saved)
        if saves:
            self.saved()
        self._has_just_saved = False
        self._verdict.fill_(self._wish())
        dist.all_reduce(self._verdict, op=dist.ReduceOp.MAX)
        self._on_host.copy_(self._verdict, non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        return Asked(_REASONS[found], saves)

    def saved(self) -> None:
        """Note a save, whoever asked for it: the time to the next one begins. Called at the same steps by all ranks, so
        that a request which was under way meanwhile is dropped by all of them."""
        self._saved_at = time.monotonic()
        self._has_just_saved = True

    def _wish(self) -> int:
        """Return what this rank asks for. A wish to stop stays."""
        now = time.monotonic()
        if self._deadline is not None and now > self._deadline:
            self._asked = max(self._asked, _OUT_OF_TIME)
        if self._signals.asked:
            self._asked = max(self._asked, _SIGNALLED)
        is_due = self._save_seconds is not None and now - self._saved_at > self._save_seconds
        return max(self._asked, _SAVE if is_due else _NOTHING)
