"""How far a run is, for people: a progress bar on a terminal, or a line now and then in a log."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from megatron_style.base.command import log
from megatron_style.base.events import TrainEvent
from megatron_style.base.units import with_prefix

_REDRAW_SECONDS = 0.2
_GAUGE = 20  # characters


@dataclass(frozen=True)
class Standing:
    """A `train` event as it is recorded, and what only people want to know beside it."""

    event: TrainEvent
    total_steps: int
    stages: int
    share_done: float  # of the run's FLOPs
    seconds_left: float
    peak_share: float | None = None  # of what the hardware can do at most, where that is known
    note: str = ""

    def line(self) -> str:
        event = self.event
        return (
            f"step {event.step}/{self.total_steps}, stage {_known(event.stage) + 1}/{self.stages}: "
            f"loss {event.loss:.4f}, gradient norm {event.grad_norm:.3f}, "
            f"learning rate {event.learning_rate:.3g}, {event.tokens:,} tokens, "
            f"{event.tokens_per_second:,.0f} tokens/s, {self._speed}, {self._memory}, {self._left} left{self.note}"
        )

    def bar(self, step: int, width: int) -> str:
        """After a later step, too. Facts that find no room are left out, the last first."""
        event, filled = self.event, int(self.share_done * _GAUGE)
        facts = (
            f"stage {_known(event.stage) + 1}/{self.stages}  step {step}/{self.total_steps}",
            f"[{'#' * filled}{'.' * (_GAUGE - filled)}] {self.share_done:.0%}",
            f"{self._left} left",
            f"loss {event.loss:.4f}",
            f"lr {event.learning_rate:.3g}",
            f"{event.tokens_per_second:,.0f} tokens/s",
            self._speed,
            self._memory,
            f"{event.tokens:,} tokens",
        )
        text = facts[0]
        for fact in facts[1:]:
            if len(text) + 2 + len(fact) >= width:  # a full line would wrap
                break
            text += "  " + fact
        return text[: width - 1]

    @property
    def _speed(self) -> str:
        used = "" if self.peak_share is None else f" ({self.peak_share:.0%} of peak)"
        return f"{with_prefix(_known(self.event.flops_per_second))}FLOP/s{used}"

    @property
    def _memory(self) -> str:
        return f"{_known(self.event.memory_bytes) / 2**30:.2f} GiB"

    @property
    def _left(self) -> str:
        return str(timedelta(seconds=round(self.seconds_left)))


class Console:
    """Standard error. Where it can show a bar, the log of the rank gets the lines instead."""

    def __init__(self, total_steps: int) -> None:
        self._stream: Any = sys.stderr  # with `draw` and `keep` where it has a bar
        self._total_steps = total_steps
        self._has_bar = hasattr(self._stream, "draw")
        self._standing: Standing | None = None
        self._drawn_at = 0.0

    def show(self, standing: Standing) -> None:
        if not self._has_bar:
            log(standing.line())
            return
        self._standing = standing
        self._stream.keep(standing.line() + "\n")
        self._draw(standing.event.step)

    def after(self, step: int) -> None:
        """Between two lines only the bar's step moves."""
        if self._has_bar and time.monotonic() - self._drawn_at > _REDRAW_SECONDS:
            self._draw(step)

    def close(self) -> None:
        if self._has_bar:
            self._stream.draw("")

    def _draw(self, step: int) -> None:
        self._drawn_at = time.monotonic()
        width: int = self._stream.width
        bar = self._standing.bar(step, width) if self._standing else f"step {step}/{self._total_steps}"[: width - 1]
        self._stream.draw(bar)


def _known(value: float | None) -> float:
    assert value is not None, "only events that this version has recorded are shown, and they have every figure"
    return value
