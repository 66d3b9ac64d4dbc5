"""Show the progress of a run: as a bar on a terminal, or as lines in a log."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import timedelta

from megatron_style.base.command import log
from megatron_style.base.events import TrainEvent
from megatron_style.base.terminal import Terminal
from megatron_style.base.units import perplexity_text, with_prefix
from megatron_style.config.run import RunConfig
from megatron_style.parallel.topology import Topology

_REDRAW_SECONDS = 0.2
_GAUGE = 20  # characters


@dataclass(frozen=True)
class ProgressLine:
    """A recorded `train` event, and the figures that are only shown in addition to it."""

    event: TrainEvent
    total_steps: int
    stages: int
    share_done: float  # of the run's FLOPs
    seconds_left: float
    peak_share: float | None = None  # of the hardware's peak FLOP/s, where that is known
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
        """Return the bar at this step, which may be later than the event's. It ends before the first fact that does not
        fit."""
        event = self.event
        filled = int(self.share_done * _GAUGE)
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
    """Shows progress as a bar on a terminal, with the lines in the log, or else as lines on standard error."""

    def __init__(self, total_steps: int, terminal: Terminal | None) -> None:
        self._total_steps = total_steps
        self._terminal = terminal
        self._last: ProgressLine | None = None
        self._drawn_at = 0.0

    def show(self, progress: ProgressLine) -> None:
        if self._terminal is None:
            log(progress.line())
            return
        self._last = progress
        self._terminal.keep(progress.line() + "\n")
        self._draw(self._terminal, progress.event.step)

    def after(self, step: int) -> None:
        """Redraw the bar. Between two lines only its step changes."""
        if self._terminal is not None and time.monotonic() - self._drawn_at > _REDRAW_SECONDS:
            self._draw(self._terminal, step)

    def close(self) -> None:
        if self._terminal is not None:
            self._terminal.draw("")

    def _draw(self, terminal: Terminal, step: int) -> None:
        self._drawn_at = time.monotonic()
        width = terminal.width
        bar = self._last.bar(step, width) if self._last else f"step {step}/{self._total_steps}"[: width - 1]
        terminal.draw(bar)


def held_out_line(step: int, total_steps: int, name: str, perplexity: float) -> str:
    """Return the line of an evaluation. The text has a name if data.valid has names."""
    text = f" of {name}" if name else ""
    return f"step {step}/{total_steps}: held-out perplexity{text} {perplexity_text(perplexity)}"


def grid_lines(run: RunConfig, topology: Topology) -> list[str]:
    """Say what an update is on this grid, and whether the run file is meant for another one."""
    warning = _another_grid(run, topology)
    return [update_line(topology, run.data.tokens_per_batch), *([warning] if warning else [])]


def _another_grid(run: RunConfig, topology: Topology) -> str | None:
    """Return a warning if the grid is not the one that the run file is meant for; None if it is."""
    meant = run.parallel.meant_for
    ranks = topology.data.size * topology.tensor.size
    if meant is None or meant == ranks:
        return None
    warning = f"warning: parallel.meant_for is {meant} ranks, and there are {ranks}"
    if run.data.tokens_per_update is not None:
        return warning
    tokens = run.data.tokens_per_batch * meant // run.parallel.tensor
    return f"{warning}: an update would have {tokens:,} tokens; --set data.tokens_per_update={tokens} keeps them"


def update_line(topology: Topology, tokens: int) -> str:
    """Say how many tokens an update has, given those of a rank: runs are compared by all of them."""
    ranks = topology.data.size
    kind = "rank" if topology.tensor.size == 1 else "data-parallel rank"
    return f"an update: {ranks} {kind}{'s' if ranks > 1 else ''} x {tokens:,} = {ranks * tokens:,} tokens"


def _known(value: float | None) -> float:
    assert value is not None, "only events of this version are shown, and they have every figure"
    return value
